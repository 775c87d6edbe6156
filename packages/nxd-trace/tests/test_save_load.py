"""Saved models compute the same in another process; damaged, incomplete and foreign ones are rejected."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import nxd_trace
import pytest
import torch
import traced_models as models
from safetensors.torch import save_file

pytestmark = pytest.mark.smoke

X = torch.linspace(-1, 1, 2 * models.IN, dtype=torch.float64).view(2, models.IN)

LOAD_AND_CALL = """
import sys, torch, nxd_trace
with nxd_trace.parallel_model_load(sys.argv[1]) as model:
    torch.save(model(torch.load(sys.argv[2])), sys.argv[3])
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model with two ranks and replaceable weights."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    with nxd_trace.parallel_model_trace(
        models.mlp,
        X,
        tp_degree=2,
        weights=models.logical_weights(),
        compiler="export",
        inline_weights_to_neff=False,
        progress=False,
    ) as model:
        nxd_trace.parallel_model_save(model, folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A copy to damage."""
    for path in saved.rglob("*"):
        if path.is_file():
            target = tmp_path / "copy" / path.relative_to(saved)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "copy"


def test_saved_model_computes_the_same_in_another_process(saved, tmp_path):
    torch.save(X, tmp_path / "x.pt")
    command = [sys.executable, "-c", LOAD_AND_CALL, saved, tmp_path / "x.pt", tmp_path / "y.pt"]

    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})

    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), models.plain_mlp(models.logical_weights(), X))


def test_saved_folder_has_a_folder_per_rank_and_one_program_of_nothing_but_data(saved):
    names = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    (program,) = (path.parent for path in saved.rglob("program.json"))

    assert {"manifest.json", "tp_rank_00/weights.safetensors", "tp_rank_01/weights.safetensors"} <= names
    assert {Path(name).suffix for name in names} == {".json", ".safetensors"}
    graph = json.loads((program / "program.json").read_text())
    assert ["aten.relu.default", [{"value": 5}], {}] in graph["nodes"]


def test_weights_are_replaced_from_logical_tensors_and_then_saved(saved, tmp_path):
    new = models.logical_weights(seed=1)
    save_file(models.logical_weights(seed=2), tmp_path / "weights.safetensors")

    with nxd_trace.parallel_model_load(saved) as model:
        model.replace_weights(new)
        torch.testing.assert_close(model(X), models.plain_mlp(new, X))
        model.restart()
        torch.testing.assert_close(model(X), models.plain_mlp(new, X))
        nxd_trace.parallel_model_save(model, tmp_path / "replaced")
        model.replace_weights(tmp_path / "weights.safetensors")
        torch.testing.assert_close(model(X), models.plain_mlp(models.logical_weights(seed=2), X))
    with nxd_trace.parallel_model_load(tmp_path / "replaced") as model:
        torch.testing.assert_close(model(X), models.plain_mlp(new, X))


def test_mismatched_new_weights_are_all_listed_and_the_model_keeps_its_own(saved, tmp_path):
    new = {name: weight.float() for name, weight in models.logical_weights(seed=1).items()}
    wrong = {"up.weight": torch.zeros(3), "up.bias": torch.ones(models.HIDDEN, dtype=torch.int64), "up.wait": X}
    save_file(new | {"up.wait": X}, tmp_path / "more.safetensors")

    with nxd_trace.parallel_model_load(saved) as model:
        with pytest.raises(ValueError, match="do not fit the model") as raised:
            model.replace_weights(wrong)
        for file_or_dict in (tmp_path / "more.safetensors", new | {"up.wait": X}):
            with pytest.raises(ValueError, match=r"up\.wait is not in the model"):
                model.replace_weights(file_or_dict)
        torch.testing.assert_close(model(X), models.plain_mlp(models.logical_weights(), X))
        model.replace_weights(new | {"tied": new["up.weight"]})
        torch.testing.assert_close(model(X), models.plain_mlp({name: it.double() for name, it in new.items()}, X))

    assert sorted(str(raised.value).splitlines()[1:-1]) == [
        "  down.weight is missing",
        "  up.bias has dtype int64, the model needs float64",
        "  up.wait is not in the model",
        "  up.weight has shape [3], the model needs [8, 6]",
    ]


def test_shards_of_a_checkpoint_are_what_the_ranks_take(saved):
    new = models.logical_weights(seed=1)

    with nxd_trace.parallel_model_load(saved) as model:
        shards = nxd_trace.shard_checkpoint(new, model)

    torch.testing.assert_close(torch.cat([shard["up.weight"] for shard in shards]), new["up.weight"])
    torch.testing.assert_close(torch.cat([shard["down.weight"] for shard in shards], dim=1), new["down.weight"])


def test_inlined_weights_cannot_be_replaced(trace):
    model = trace(models.mlp, X, weights=models.logical_weights())

    with pytest.raises(ValueError, match="trace it with inline_weights_to_neff=False to replace them"):
        model.replace_weights(models.logical_weights())


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_input(folder: Path, **changes: object) -> None:
    """Return the first program's entry in the manifest."""
    programs = json.loads((folder / "manifest.json").read_text())["programs"]
    programs[0]["inputs"][0] |= changes
    edit_manifest(folder, programs=programs)


def move_programs(folder: Path, where: str) -> None:
    """Make a rank's programs point elsewhere, with a matching manifest."""
    path = folder / "tp_rank_01" / "rank.json"
    rank = json.loads(path.read_text())
    rank["programs"][0]["folder"] = where
    path.write_text(json.dumps(rank))
    files = json.loads((folder / "manifest.json").read_text())["files"]
    content = path.read_bytes()
    files["tp_rank_01/rank.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(folder, files=files)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: edit_manifest(folder, torch="2.1.0"), "was compiled for torch 2.1.0, but this is"),
        (lambda folder: edit_manifest(folder, system="Linux aarch65"), "for system Linux aarch65, but this is"),
        (lambda folder: edit_manifest(folder, device="xla"), "for device xla, but this is cpu"),
        (lambda folder: edit_manifest(folder, format=99), "has format 99"),
        (lambda folder: edit_manifest(folder, format="one"), "manifest.json is damaged"),
        (
            lambda folder: edit_manifest(folder, tp_degree=4),
            "tp_degree is 4, .* files of 2 ranks",
        ),
        (
            lambda folder: edit_manifest(folder, tp_degree=1),
            "tp_degree is 1, replicas is 1, .* files of 2 ranks",
        ),
        (lambda folder: edit_manifest(folder, tp_degree="2"), "damaged .tp_degree is '2'"),
        (
            lambda folder: edit_manifest(folder, files={}),
            "tp_degree is 2, .* files of 0 ranks",
        ),
        (
            lambda folder: edit_manifest(folder, files={"../x": {"size": 1, "sha256": ""}}),
            "'../x' is outside the folder",
        ),
        (lambda folder: edit_manifest(folder, programs=[]), "damaged .there are no programs"),
        (lambda folder: edit_manifest(folder, compiler="gcc"), "damaged .compiler is 'gcc', not one of export"),
        (lambda folder: edit_input(folder, dtype="os"), "damaged .'os' is not a torch dtype"),
        (lambda folder: edit_input(folder, shape=[-1, 6]), r"damaged .\[-1, 6\] is not a tensor shape"),
        (lambda folder: move_programs(folder, "../elsewhere"), "rank.json and manifest.json name different programs"),
        (lambda folder: remove(folder / "tp_rank_01"), "tp_rank_01 is missing: the model has 2 ranks"),
        (
            lambda folder: cut_off(folder / "tp_rank_01" / "weights.safetensors"),
            "weights.safetensors has .* bytes of",
        ),
        (lambda folder: cut_off(folder / "manifest.json"), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").unlink(), "holds no traced model"),
        (
            lambda folder: (folder / "tp_rank_00" / "rank.json").write_bytes(
                (folder / "tp_rank_00" / "rank.json").read_bytes().replace(b"up", b"UP")
            ),
            "rank.json has been changed since it was saved",
        ),
    ],
)
def test_damaged_incomplete_or_foreign_model_is_refused_before_a_process_starts(copy, damage, text):
    damage(copy)

    with pytest.raises(nxd_trace.ModelFolderError, match=text):
        nxd_trace.parallel_model_load(copy)


def test_saving_replaces_a_model_but_nothing_else(saved, copy, tmp_path):
    for name, file in (("notes", "thoughts.txt"), ("app", "manifest.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "link").symlink_to(copy)

    with nxd_trace.parallel_model_load(saved) as model:
        for name in ("notes", "app"):
            with pytest.raises(ValueError, match=r"holds other files .*; pass a new folder"):
                nxd_trace.parallel_model_save(model, tmp_path / name)
        (copy / "mine.txt").write_text("keep me")
        with pytest.raises(ValueError, match=r"holds other files .'mine.txt'"):
            nxd_trace.parallel_model_save(model, copy)
        (copy / "mine.txt").unlink()
        cut_off(copy / "tp_rank_00" / "weights.safetensors")
        nxd_trace.parallel_model_save(model, tmp_path / "link")
    with pytest.raises(TypeError, match="got a Linear; expected a TensorParallelModel"):
        nxd_trace.parallel_model_save(torch.nn.Linear(1, 1), tmp_path)

    with nxd_trace.parallel_model_load(copy) as model:
        torch.testing.assert_close(model(X), models.plain_mlp(models.logical_weights(), X))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app", "copy", "link", "notes"]


def test_weights_of_a_dict_may_be_views_and_are_named_if_they_cannot_be_stored(saved):
    weights = models.logical_weights(seed=2)
    strided = {name: weight.t().contiguous().t() if weight.dim() == 2 else weight for name, weight in weights.items()}

    with nxd_trace.parallel_model_load(saved) as model:
        model.replace_weights(strided)
        torch.testing.assert_close(model(X), models.plain_mlp(weights, X))
        with pytest.raises(
            ValueError, match=r"weights\['up.bias'\] has dtype complex128, which safetensors does not support"
        ):
            model.replace_weights(weights | {"up.bias": weights["up.bias"].to(torch.complex128)})
        with pytest.raises(TypeError, match=r"weights\['up.bias'\] is a int; expected a tensor"):
            model.replace_weights(weights | {"up.bias": 3})
