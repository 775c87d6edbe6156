"""Saved models compute the same in another process; damaged, incomplete and foreign ones are refused."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import nxd_trace
import pytest
import torch
import traced_models as models
from safetensors.torch import save_file

X = torch.linspace(-1, 1, 2 * models.IN, dtype=torch.float64).view(2, models.IN)

LOAD_AND_CALL = """
import sys, torch, nxd_trace
with nxd_trace.parallel_model_load(sys.argv[1]) as model:
    torch.save(model(torch.load(sys.argv[2])), sys.argv[3])
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of two ranks, whose weights can be replaced; saved, and closed."""
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


def test_saved_folder_has_a_folder_per_rank_and_no_pickles(saved):
    names = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    programs = [saved / name for name in names if name.endswith(".pt2")]

    assert {"manifest.json", "tp_rank_00/weights.safetensors", "tp_rank_01/weights.safetensors"} <= names
    assert len(programs) == 1
    with zipfile.ZipFile(programs[0]) as archive:
        pickles = [info for info in archive.infolist() if info.filename.endswith((".pkl", ".pt")) and info.file_size]
    assert pickles == []


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
        with pytest.raises(nxd_trace.WorkerError, match=r"up.weight has shape \[3\], the model needs \[8, 6\]"):
            model.replace_weights({**new, "up.weight": torch.zeros(3)})
        torch.testing.assert_close(model(X), models.plain_mlp(models.logical_weights(seed=2), X))
    with nxd_trace.parallel_model_load(tmp_path / "replaced") as model:
        torch.testing.assert_close(model(X), models.plain_mlp(new, X))


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


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: edit_manifest(folder, torch="2.1.0"), "was compiled for torch 2.1.0, this is"),
        (lambda folder: edit_manifest(folder, system="Linux aarch65"), "for system Linux aarch65, this is"),
        (lambda folder: edit_manifest(folder, device="xla"), "for device xla, this is cpu"),
        (lambda folder: edit_manifest(folder, format=99), "has format 99"),
        (lambda folder: edit_manifest(folder, tp_degree=4), "tp_rank_03 is missing: the model has 4 shards"),
        (lambda folder: remove(folder / "tp_rank_01"), "tp_rank_01 is missing: the model has 2 shards"),
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
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thoughts.txt").write_text("keep me")

    with nxd_trace.parallel_model_load(saved) as model:
        with pytest.raises(ValueError, match="holds other files; give a new folder"):
            nxd_trace.parallel_model_save(model, tmp_path / "notes")
        cut_off(copy / "tp_rank_00" / "weights.safetensors")
        nxd_trace.parallel_model_save(model, copy)
    with pytest.raises(TypeError, match="got a Linear; expected what parallel_model_trace returns"):
        nxd_trace.parallel_model_save(torch.nn.Linear(1, 1), tmp_path)

    with nxd_trace.parallel_model_load(copy) as model:
        torch.testing.assert_close(model(X), models.plain_mlp(models.logical_weights(), X))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "notes"]
