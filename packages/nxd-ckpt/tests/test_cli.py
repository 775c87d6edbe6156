"""The console script, called as its entry point is; once as the process that it makes."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from nxd_ckpt import PerRank, Shard, ShardedTensor, list_checkpoints, load, open_checkpoint, save, stores
from nxd_ckpt.cli import main
from nxd_ckpt.interop import as_extra, companions_in, read_companions
from nxd_ckpt.testing import run_on_threads
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

WEIGHT = torch.arange(64.0).reshape(8, 8)
LLAMA = ["--sharding", "llama"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints, of two ranks; the newer has another weight."""

    def save_half(ranks) -> None:
        rows = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        for step in (1, 2):
            half = ShardedTensor((8, 8), [Shard(WEIGHT[rows] * step, (rows.start, 0))])
            state = {"model.layers.0.q_proj.weight": half, "model.norm": torch.ones(2, dtype=torch.bfloat16)}
            save(tmp_path / "runs", f"step-{step}", state, step=step, objects={"lr": 0.1}, process_group=ranks)

    run_on_threads(save_half, world_size=2)
    return tmp_path / "runs"


@pytest.fixture
def run(capsys):
    """`run(*arguments)`: exit code, standard output, standard error."""

    def call(*arguments) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def run_json(run):
    """`run_json(*arguments)`: exit code and what `--json` printed."""

    def call(*arguments) -> tuple[int, object]:
        code, out, _ = run(*arguments, "--json")
        return code, json.loads(out)

    return call


def data_file(root: Path, tag: str) -> Path:
    return max((root / tag).rglob("*.safetensors"), key=lambda file: file.stat().st_size)


def flip_byte(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_the_console_script_is_this_one():
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())

    assert pyproject["project"]["scripts"]["nxd-ckpt"] == "nxd_ckpt.cli:main"


def test_as_a_process_it_prints_one_line_and_exits_as_documented(root):
    command = [sys.executable, "-m", "nxd_ckpt.cli", "verify", str(root), "--tag", "x"]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert "there is no checkpoint 'x'" in ended.stderr


def test_list_shows_the_checkpoints_oldest_first(run, run_json, root):
    code, out, _ = run("list", root)

    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["TAG", "step-1", "step-2"]
    assert [entry["tag"] for entry in run_json("list", root)[1]] == ["step-1", "step-2"]


def test_inspect_shows_tree_shapes_sizes_and_writers(run, root):
    code, out, _ = run("inspect", root)

    assert code == 0
    assert "tag: step-2" in out
    assert "world_size: 2" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert re.split(r" {2,}", lines["layers.0.q_proj.weight"].strip())[1:] == [
        "float32",
        "[8, 8]",
        "256 B",
        "ranks 0-1",
    ]
    assert "bfloat16" in lines["norm"]
    assert "2 tensors" in lines["model"]


def test_inspect_and_list_show_what_else_a_checkpoint_holds(run, tmp_path):
    def write(ranks):
        state = {"weight": torch.ones(2), "random": PerRank({"seed": ranks.rank}), "epoch": 3, "names": ["a"] * 99}
        save(
            tmp_path,
            "a",
            state,
            objects={"metrics": {"loss": 2.5}},
            rank_objects={"read": ranks.rank},
            process_group=ranks,
        )

    run_on_threads(write, world_size=2)
    lines = run("inspect", tmp_path)[1].splitlines()

    assert "values: epoch=3, names" in lines
    assert "of_each_rank: read (2 ranks), random (2 ranks)" in lines
    assert 'objects: metrics={"loss": 2.5}' in lines
    assert run("list", tmp_path)[1].splitlines()[1].endswith("loss 2.5")


def test_inspect_sums_up_what_is_deeper(run, root):
    _, out, _ = run("inspect", root, "--depth", 1)

    assert "2 tensors" in out
    assert "q_proj" not in out


def test_inspect_as_json_says_everything(run_json, root):
    code, data = run_json("inspect", root / "step-1")  # the checkpoint's own folder will do

    assert code == 0
    assert (data["tag"], data["step"], data["world_size"], data["num_tensors"]) == ("step-1", 1, 2, 2)
    assert data["tensors"]["model.layers.0.q_proj.weight"] == {
        "dtype": "float32",
        "shape": [8, 8],
        "bytes": 256,
        "written_by": [0, 1],
    }


def test_verify_finds_a_whole_checkpoint_good(run_json, root):
    assert run_json("verify", root)[0] == 0
    assert run_json("verify", root, "--deep") == (
        0,
        {"tag": "step-2", "deep": True, "good": True, "bytes": pytest.approx(800, rel=0.5), "problems": []},
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes() + b"x"),
        lambda file: (file.parents[1] / "manifest.json").write_bytes(b"{}"),
        lambda file: flip_byte(file.parents[1] / "manifest.json", -20),
    ],
    ids=["missing", "truncated", "extended", "no manifest", "flipped manifest"],
)
def test_verify_sees_damage_without_reading_everything(run_json, root, damage):
    damage(data_file(root, "step-2"))

    code, data = run_json("verify", root, "--tag", "step-2")

    assert code == 1
    assert not data["good"]
    assert data["problems"]


@pytest.mark.parametrize("position", [-1, 10], ids=["data", "header"])
def test_verify_deep_sees_a_flipped_bit(run_json, root, position):
    flip_byte(data_file(root, "step-2"), position)

    assert run_json("verify", root)[0] == 0
    code, data = run_json("verify", root, "--deep")
    assert code == 1
    assert data_file(root, "step-2").name in data["problems"][0]


def test_verify_all_checks_every_checkpoint_oldest_first(run, run_json, root):
    code, out, _ = run("verify", root, "--all", "--deep")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == ["step-1", "step-2"]

    flip_byte(data_file(root, "step-1"), -1)
    (root / "step-2" / "manifest.json").write_bytes(b"{}")
    save(root, "step-10", {"w": torch.ones(1)}, step=10)
    code, data = run_json("verify", root, "--all", "--deep")
    assert code == 1
    assert [(of["tag"], of["good"]) for of in data] == [("step-1", False), ("step-10", True), ("step-2", False)]


def test_verify_all_skips_a_checkpoint_that_is_deleted_meanwhile(run, root, monkeypatch):
    def deleted_first(path, tag):
        if tag == "step-1":
            shutil.rmtree(root / tag)
        return open_checkpoint(path, tag)

    monkeypatch.setattr("nxd_ckpt.cli.verification.open_checkpoint", deleted_first)
    code, out, _ = run("verify", root, "--all")

    assert code == 0
    assert out.startswith("step-2: complete")


def test_diff_of_equal_checkpoints_is_zero(run, root):
    assert run("diff", root / "step-1", root / "step-1")[0] == 0
    assert run("diff", root, root, "--first-tag", "step-2", "--second-tag", "step-2")[0] == 0


def test_diff_names_what_differs(run, run_json, root):
    code, out, _ = run("diff", root / "step-1", root / "step-2")

    assert code == 1
    assert out.splitlines()[0] == f"first: {root}/step-1, step-1; second: {root}/step-2, step-2"
    assert "model.layers.0.q_proj.weight: 63 of 64 elements differ, by at most 63.0" in out
    assert "1 of 2 common tensors are equal bit by bit" in out
    assert run_json("diff", root / "step-1", root / "step-2", "--exclude", "*q_proj*")[0] == 0


def test_diff_sees_names_shapes_types_and_the_sign_of_zero(run_json, tmp_path):
    save(tmp_path, "a", {"x": torch.ones(2), "shape": torch.ones(2), "type": torch.ones(2), "zero": torch.zeros(1)})
    second = {"y": torch.ones(2), "shape": torch.ones(3), "type": torch.ones(2).half(), "zero": -torch.zeros(1)}
    save(tmp_path, "b", second)

    code, data = run_json("diff", tmp_path / "a", tmp_path / "b")

    assert code == 1
    assert (data["only_in_first"], data["only_in_second"]) == (["x"], ["y"])
    assert set(data["different"]) == {"shape", "type", "zero"}


@pytest.mark.parametrize(("atol", "expected"), [(0.1, 0), (0.001, 1)])
def test_diff_with_a_tolerance_lets_types_and_small_gaps_pass(run, tmp_path, atol, expected):
    save(tmp_path, "a", {"x": torch.tensor([1.0, torch.nan])})
    save(tmp_path, "b", {"x": torch.tensor([1.01, torch.nan], dtype=torch.float64)})

    assert run("diff", tmp_path / "a", tmp_path / "b", "--atol", atol)[0] == expected


@pytest.mark.parametrize("arguments", [["--rtol", "-1"], ["--atol", "nan"], ["--atol", "x"]])
def test_diff_with_an_impossible_tolerance_is_a_usage_error(run, root, arguments):
    with pytest.raises(SystemExit) as exit_:
        run("diff", root / "step-1", root / "step-2", *arguments)

    assert exit_.value.code == 2


def test_diff_counts_elements_whose_bits_differ_though_their_values_are_equal(run_json, tmp_path):
    save(tmp_path, "a", {"zero": torch.zeros(2), "large": torch.tensor([2**63 - 1, 2**53 + 1, -(2**63)])})
    save(tmp_path, "b", {"zero": torch.tensor([0.0, -0.0]), "large": torch.tensor([2**63 - 2, 2**53, 2**63 - 1])})

    code, data = run_json("diff", tmp_path / "a", tmp_path / "b")

    assert code == 1
    assert data["different"]["zero"] == {
        "elements": 1,
        "of": 2,
        "largest_gap": 0.0,
        "largest_relative_gap": 0.0,
    }
    assert data["different"]["large"] == {
        "elements": 3,
        "of": 3,
        "largest_gap": 2.0**64,
        "largest_relative_gap": 2.0,
    }


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (torch.tensor([2**53 + 1]), torch.tensor([2**53]), 1),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1),
        (torch.tensor([3], dtype=torch.uint64), torch.tensor([3.0]), 0),
        (torch.tensor([1 + 0j]), torch.tensor([1.0]), 0),
        (torch.tensor([1 + 1j]), torch.tensor([1.0]), 1),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf]), 1),
        (torch.tensor([torch.inf]), torch.tensor([torch.inf], dtype=torch.float64), 0),
        (torch.tensor([1.0]), torch.tensor([torch.inf]), 1),
        (torch.tensor([1.0]), torch.tensor([torch.nan]), 1),
        (torch.empty(0), torch.empty(0, dtype=torch.int8), 0),
    ],
)
def test_diff_with_a_tolerance_of_half_of_any_types(run, tmp_path, first, second, expected):
    save(tmp_path, "a", {"x": first})
    save(tmp_path, "b", {"x": second})

    assert run("diff", tmp_path / "a", tmp_path / "b", "--atol", 0.5)[0] == expected


def test_convert_goes_around_all_formats_and_back_bit_by_bit(run, root, tmp_path):
    sharding = tmp_path / "sharding.json"
    sharding.write_text(json.dumps({"*q_proj.weight": {"dim": 0}}))
    stages = tmp_path / "stages.json"
    stages.write_text(json.dumps({"model.norm": 1}))
    to_v2 = ["--to", "neuronx-v2", "--target-tag", "t", "--tp", 2, "--xser", "--stages", stages, "--sharding", sharding]
    steps = [
        (root, tmp_path / "hf", "--to", "hf", "--max-shard-size", "100B"),
        (tmp_path / "hf", tmp_path / "dcp", "--to", "dcp"),
        (tmp_path / "dcp", tmp_path / "v2", *to_v2),
        (tmp_path / "v2", tmp_path / "v1", "--to", "neuronx-v1", "--tp", 4, "--sharding", sharding),
        (tmp_path / "v1", tmp_path / "back", "--to", "nxd", "--target-tag", "z", "--step", 7, "--sharding", sharding),
    ]
    for step in steps:
        code, out, err = run("convert", *step)
        assert (code, err) == (0, ""), step
        assert out.startswith("wrote 2 tensors")

    assert run("diff", root, tmp_path / "back")[0] == 0
    assert [(info.tag, info.step) for info in list_checkpoints(tmp_path / "back")] == [("z", 7)]
    assert (tmp_path / "v2" / "t" / "model" / "dp_rank_00_tp_rank_01_pp_rank_01.pt").exists()
    assert run("diff", tmp_path / "hf", tmp_path / "v2", "--sharding", sharding)[0] == 0
    state = {"model.norm": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["model.norm"], torch.ones(2, dtype=torch.bfloat16))


def test_convert_selects_and_changes_types(run_json, root, tmp_path):
    code, data = run_json(
        "convert", root, tmp_path / "hf", "--to", "hf", "--include", "*weight", "--dtype", "bfloat16", "--tag", "step-1"
    )

    assert (code, data["from"], data["num_tensors"]) == (0, "nxd", 1)
    read = load_file(tmp_path / "hf" / "model.safetensors")
    assert list(read) == ["model.layers.0.q_proj.weight"]
    assert torch.equal(read["model.layers.0.q_proj.weight"], WEIGHT.to(torch.bfloat16))


@pytest.mark.parametrize("arguments", [[], ["--step", 8]])
def test_copy_by_convert_has_the_step_and_what_each_rank_saved_of_its_own(run, tmp_path, arguments):
    def state(ranks):
        return {"weight": torch.ones(4), "random": PerRank({"seed": 100 + ranks.rank}), "epoch": 3}

    def write(ranks):
        save(tmp_path / "runs", "a", state(ranks), step=7, rank_objects={"read": ranks.rank}, process_group=ranks)

    def read(ranks):
        into = {"weight": torch.zeros(4), "random": PerRank({"seed": 0}), "epoch": 0}
        loaded = load(tmp_path / "copy", into=into, process_group=ranks)
        return into["random"].value["seed"], into["epoch"], loaded.rank_objects["read"], loaded.step

    run_on_threads(write, world_size=2)
    to = ["--to", "nxd", "--target-tag", "b", *arguments]
    assert run("convert", tmp_path / "runs", tmp_path / "copy", *to)[0] == 0

    step = arguments[1] if arguments else 7
    assert run_on_threads(read, world_size=2) == [(100, 3, 0, step), (101, 3, 1, step)]


def test_convert_of_a_part_leaves_its_path_out_of_the_names(run, tmp_path):
    model = torch.nn.Linear(2, 2)
    save(tmp_path / "runs", "a", {"net": model, "average": torch.nn.Linear(3, 3)})

    code, out, _ = run("convert", tmp_path / "runs", tmp_path / "hf", "--to", "hf", "--part", "net")
    whole = run("convert", tmp_path / "runs", tmp_path / "whole", "--to", "hf", "--include", "net.*")[1]
    missing = run("convert", tmp_path / "runs", tmp_path / "none", "--to", "hf", "--part", "model")[2]

    assert code == 0
    assert "--part" not in out
    written = load_file(tmp_path / "hf/model.safetensors")
    assert sorted(written) == ["bias", "weight"]
    assert torch.equal(written["weight"], model.weight)
    assert "all names begin with net.; pass --part net to leave it out" in whole
    assert "there are no tensors below 'model'; the tensors are below average, net" in missing


def test_inspect_and_diff_take_other_formats(run, run_json, root, tmp_path):
    run("convert", root, tmp_path / "hf", "--to", "hf")

    assert run_json("inspect", tmp_path / "hf")[1]["kind"] == "hf"
    assert run_json("inspect", tmp_path / "hf" / "model.safetensors")[1]["num_tensors"] == 2
    assert run("diff", root, tmp_path / "hf")[0] == 0


def test_inspect_of_neuronx_without_a_sharding_shows_shapes_of_rank_files(run, run_json, root, tmp_path):
    sharding = tmp_path / "rules.json"
    sharding.write_text('{"*.q_proj.weight": {"dim": 0}}')
    to = ("--to", "neuronx-v2", "--target-tag", "t", "--tp", 2, "--sharding", sharding)
    assert run("convert", root, tmp_path / "v2", *to)[0] == 0

    code, out, _ = run("inspect", tmp_path / "v2")

    assert code == 0
    assert "shapes: in each rank's file; --sharding llama, or a JSON file, shows those of whole tensors" in out
    assert re.search(r"q_proj.weight +float32 +\[4, 8\]", out)
    whole = run_json("inspect", tmp_path / "v2", "--sharding", sharding)[1]
    assert whole["tensors"]["model.layers.0.q_proj.weight"]["shape"] == [8, 8]
    assert "shapes" not in whole


def test_commands_take_the_folder_of_a_run(run, root, tmp_path):
    root.rename(tmp_path / "checkpoints")
    (tmp_path / "recipe.toml").touch()

    assert run("verify", tmp_path)[:2] == run("verify", tmp_path / "checkpoints")[:2]
    assert run("list", tmp_path)[1].count("step-") == 2
    assert run("diff", tmp_path, tmp_path / "checkpoints")[0] == 0
    assert run("delete", tmp_path, "step-1")[0] == 0
    assert [it.tag for it in list_checkpoints(tmp_path / "checkpoints")] == ["step-2"]


def test_foreign_formats_behind_a_url_are_read(run, run_json, root, tmp_path):
    pytest.importorskip("fsspec")
    run("convert", root, tmp_path / "hf", "--to", "hf")

    code, data = run_json("inspect", f"local://{tmp_path / 'hf'}", "--from", "hf")

    assert (code, data["num_tensors"]) == (0, 2)


def test_what_a_url_cannot_give_is_one_line(run, monkeypatch):
    class StorageError(Exception):
        pass

    def fail(*_: object, **__: object) -> None:
        raise StorageError("no credentials")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.get", fail)

    code, out, err = run("inspect", "memory://a", "--from", "hf")

    assert (code, out) == (2, "")
    assert err == "nxd-ckpt inspect: memory://a cannot be read: StorageError: no credentials\n"


def test_url_of_a_package_that_is_not_installed_says_what_to_install(run, monkeypatch):
    stores._factory_of.cache_clear()
    monkeypatch.setattr(stores, "entry_points", lambda **_: ())

    code, out, err = run("list", "peers://10.0.0.1:4001/")

    assert (code, out) == (2, "")
    assert err == "nxd-ckpt list: checkpoints at peers:// need another package: pip install nxd-elastic\n"


def test_names_cannot_move_the_cursor_or_break_lines(run, run_json, tmp_path):
    save(tmp_path, "a", {"red\x1b[31m": torch.ones(1), "two\nlines": torch.ones(1)})
    save(tmp_path, "b", {"x": torch.ones(1)})

    for command in (["inspect", tmp_path, "--tag", "a"], ["diff", tmp_path / "a", tmp_path / "b"]):
        _, out, _ = run(*command)
        assert r"red\x1b[31m" in out
        assert r"two\nlines" in out
        assert "\x1b" not in out
    assert "two\nlines" in run_json("inspect", tmp_path / "a")[1]["tensors"]


def test_a_terminal_without_unicode_gets_escapes(tmp_path, monkeypatch):
    save(tmp_path, "a", {"gewicht.é": torch.ones(1)})
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)

    assert main(["inspect", str(tmp_path)]) == 0

    assert rb"gewicht.\xe9" in terminal.buffer.getvalue()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_goes_away_does_not_change_the_exit_code(root, tmp_path, monkeypatch, options):
    data_file(root, "step-2").unlink()
    for path, expected in ((root, 1), (tmp_path / "nowhere", 2)):
        reading_end, writing_end = os.pipe()
        os.close(reading_end)
        with os.fdopen(writing_end, "w") as broken_pipe:
            monkeypatch.setattr(sys, "stdout", broken_pipe)
            assert main(["verify", str(path), *options]) == expected


def test_json_has_no_nan(run, tmp_path):
    save(tmp_path, "a", {"w": torch.ones(1)}, objects={"metrics": {"loss": float("nan")}}, mesh={"x": float("inf")})

    for command in (["list", tmp_path], ["inspect", tmp_path]):
        _, out, _ = run(*command, "--json")
        json.loads(out, parse_constant=pytest.fail)


def test_a_checkpoint_without_tensors_is_equal_to_itself_and_converted(run, tmp_path):
    save(tmp_path / "a", "a", {}, objects={"n": 1})

    assert run("diff", tmp_path / "a", tmp_path / "a")[0] == 0
    assert run("convert", tmp_path / "a", tmp_path / "b", "--to", "nxd", "--target-tag", "x")[0] == 0
    assert open_checkpoint(tmp_path / "b").objects == {"n": 1}


def test_a_name_of_very_many_parts_is_no_traceback(run, tmp_path):
    save(tmp_path, "a", {"a." * i + "w": torch.ones(1) for i in range(1200)})

    code, _, err = run("inspect", tmp_path)

    assert (code, err.count("\n")) in ((0, 0), (2, 1))


def test_pin_and_unpin_are_seen_by_list(run, run_json, root):
    assert run("pin", root, "step-1")[0] == 0
    assert [entry["pinned"] for entry in run_json("list", root)[1]] == [True, False]
    assert run("unpin", root, "step-1")[0] == 0
    assert [entry["pinned"] for entry in run_json("list", root)[1]] == [False, False]


def test_retain_and_delete_remove_checkpoints_by_the_rules(run, run_json, root):
    assert run("pin", root, "step-1")[0] == 0
    assert run_json("retain", root, "--keep-last", 1) == (0, {"removed": []})
    code, _, err = run("delete", root, "step-1")
    assert (code, "is pinned; unpin it first" in err) == (2, True)
    run("unpin", root, "step-1")

    assert run("retain", root, "--keep-last", 1) == (0, "removed step-1\n", "")
    assert run_json("delete", root, "step-2") == (0, {"removed": ["step-2"]})
    assert list_checkpoints(root) == []
    assert run("retain", root, "--keep-last", 0)[0] == 2


def test_delete_says_what_is_the_newest_now(run, root):
    assert run("delete", root, "step-2") == (0, "removed step-2; the newest is step-1\n", "")
    assert run("delete", root, "step-1") == (0, "removed step-1; no checkpoint is left\n", "")


def test_delete_removes_a_checkpoint_with_a_damaged_manifest(run, root):
    (root / "step-2" / "manifest.json").write_text("damaged")

    assert run("delete", root, "step-2") == (0, "removed step-2; the newest is step-1\n", "")
    assert not (root / "step-2").exists()


def test_delete_of_a_damaged_manifest_beside_foreign_files_is_refused(run, root):
    (root / "site").mkdir()
    (root / "site" / "manifest.json").write_text("{}")
    (root / "site" / "index.html").write_text("five years")

    code, _, err = run("delete", root, "site")

    assert (code, "nxd-ckpt did not write" in err, "site by hand" in err) == (2, True, True)
    assert (root / "site" / "index.html").exists()


def test_verify_says_good_only_of_what_it_has_read(run, root):
    assert run("verify", root)[1].startswith("step-2: complete, ")
    assert run("verify", root)[1].endswith("; contents not read, use --deep\n")
    assert run("verify", root, "--deep")[1].startswith("step-2: good, ")


def test_diff_counts_names_that_begin_alike_instead_of_listing_them(run, run_json, tmp_path):
    model = {f"model.{number}": torch.zeros(1) for number in range(9)}
    save(tmp_path, "a", {"x": torch.zeros(1), **model})
    save(tmp_path, "b", {"x": torch.zeros(1), "y": torch.zeros(1)})
    tags = ("--first-tag", "a", "--second-tag", "b")

    _, out, _ = run("diff", tmp_path, tmp_path, *tags)

    assert out.splitlines()[1:3] == [
        "only in the first: 9 tensors model.*, such as model.0, model.1",
        "only in the second: y",
    ]
    assert run_json("diff", tmp_path, tmp_path, *tags)[1]["only_in_first"] == list(model)


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 cannot copy pairs of four bits")
def test_verify_deep_knows_how_headers_have_types_of_ours(run, tmp_path):
    pairs = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    save(tmp_path, "a", {"z": torch.ones(2, 3, dtype=torch.complex128), "pairs": pairs, "one": pairs[0]})

    assert run("verify", tmp_path, "--deep")[0] == 0


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])

    lines = capsys.readouterr().out.splitlines()
    assert exit_.value.code == 0
    assert lines[:2] == [f"nxd-ckpt {version('nxd-ckpt')}", f"torch {version('torch')}"]
    assert lines[-1].startswith("python 3.")


@pytest.mark.parametrize("saved_by", ["nested state", "nxd-trainer", "torch"])
def test_convert_to_hugging_faces_format_writes_the_model_alone(run_json, tmp_path, saved_by):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    if saved_by == "nested state":
        save(tmp_path / "runs", "a", {"model": model, "optim": optimizer, "step": 1})
    elif saved_by == "torch":
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optim": states[1]}, checkpoint_id=tmp_path / "runs", no_dist=True)
    else:
        weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        moments = {f"optimizer/{name}/exp_avg": torch.zeros_like(tensor) for name, tensor in weights.items()}
        save(tmp_path / "runs", "a", weights | moments | {"rng/rank-00000/default/cpu": torch.get_rng_state()})

    code, data = run_json("convert", tmp_path / "runs", tmp_path / "hf", "--to", "hf")
    everything = run_json("convert", tmp_path / "runs", tmp_path / "all", "--to", "hf", "--include", "*")[1]

    assert code == 0
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"model.weight", "model.bias"}
    assert everything["num_tensors"] == 2 + len(data["left_out"]) > 2


def test_convert_between_torchs_format_and_ours_says_what_becomes_of_values(run, tmp_path):
    model = torch.nn.Linear(2, 2)
    dcp.save({"model": model.state_dict(), "step": 20, "lr": 0.1}, checkpoint_id=tmp_path / "old", no_dist=True)
    save(tmp_path / "runs", "a", {"model": model, "epoch": 3})

    to_ours = run("convert", tmp_path / "old", tmp_path / "new", "--to", "nxd", "--target-tag", "a")[1]
    to_torch = run("convert", tmp_path / "runs", tmp_path / "dcp", "--to", "dcp")[1]

    assert "values that are no tensors, such as step, are kept as objects" in to_ours
    assert [info.step for info in list_checkpoints(tmp_path / "new")] == [20]
    assert "values that are no tensors, such as epoch, are not written" in to_torch


def test_convert_to_neuronx_writes_the_model_alone(run_json, tmp_path):
    weights = {"w": torch.ones(4, 2)}
    save(tmp_path / "runs", "a", weights | {"optimizer/w/exp_avg": torch.ones(4, 2)})
    rules = tmp_path / "rules.json"
    rules.write_text('{"w": {"dim": 0}}')
    to = ("--to", "neuronx-v2", "--target-tag", "step_1", "--sharding", rules, "--tp", "2")

    code, data = run_json("convert", tmp_path / "runs", tmp_path / "old", *to)

    assert (code, data["left_out"]) == (0, ["optimizer/w/exp_avg"])
    file = tmp_path / "old" / "step_1" / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    assert torch.load(file).keys() == {"w"}


# Weights of a Llama that NeuronX Distributed fuses.

GATE, UP = torch.randn(16, 4), torch.randn(16, 4)
MLP = "model.layers.0.mlp."


def write_fused_llama(folder: Path, tp: int) -> None:
    """Write a v2 folder with each rank's part of gate above its part of up."""
    (folder / "step_1" / "model").mkdir(parents=True)
    for rank in range(tp):
        fused = torch.cat([GATE.chunk(tp)[rank], UP.chunk(tp)[rank]])
        state = {f"{MLP}gate_up_proj.weight": fused, f"{MLP}down_proj.weight": GATE.T.chunk(tp, 1)[rank].clone()}
        torch.save(state, folder / "step_1" / "model" / f"dp_rank_00_tp_rank_0{rank}_pp_rank_00.pt")
    for marker in ("checkpoint", "done"):
        (folder / "step_1" / marker).touch()


def test_fused_weight_in_a_hugging_face_folder_is_said_with_the_way_to_split_it(run, tmp_path):
    save(tmp_path / "runs", "a", {f"{MLP}gate_up_proj.weight": torch.cat([GATE, UP]), "norm": GATE})

    fused = run("convert", tmp_path / "runs", tmp_path / "fused", "--to", "hf")[1]
    split = run("convert", tmp_path / "runs", tmp_path / "split", "--to", "hf", *LLAMA)[1]

    assert f"{MLP}gate_up_proj.weight holds gate and up together" in fused
    assert "pass --sharding llama" in fused
    assert "gate and up together" not in split


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("through_nxd", [False, True])
def test_llama_with_fused_gate_and_up_becomes_that_of_hugging_face(run, tmp_path, tp, through_nxd):
    write_fused_llama(tmp_path / "old", tp)
    source = tmp_path / "old"
    if through_nxd:
        assert run("convert", source, tmp_path / "nxd", "--to", "nxd", "--target-tag", "a", *LLAMA)[0] == 0
        source = tmp_path / "nxd"

    code, _, err = run("convert", source, tmp_path / "hf", "--to", "hf", *LLAMA)

    assert (code, err) == (0, "")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == {f"{MLP}{it}_proj.weight" for it in ("gate", "up", "down")}
    assert torch.equal(found[f"{MLP}gate_proj.weight"], GATE)
    assert torch.equal(found[f"{MLP}up_proj.weight"], UP)
    assert torch.equal(found[f"{MLP}down_proj.weight"], GATE.T)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.0.self_attn.qkv_proj.weight", (8, 4), "qkv_proj.weight holds queries, keys and values together"),
        (f"{MLP}gate_up_proj.weight", (7, 4), r"gate_up_proj.weight \[7, 4\] is not a gate and an up"),
    ],
)
def test_fused_weights_of_a_llama_that_cannot_be_split_are_refused(run, tmp_path, name, shape, message):
    save(tmp_path / "runs", "a", {name: torch.ones(shape)})

    code, _, err = run("convert", tmp_path / "runs", tmp_path / "hf", "--to", "hf", *LLAMA)

    assert code == 2
    assert re.search(message, err)
    assert not (tmp_path / "hf").exists()


def test_convert_from_neuronx_shows_a_whole_shape_for_each_kind_of_rule(run, tmp_path):
    write_fused_llama(tmp_path / "old", 2)
    rules = tmp_path / "rules.json"
    rules.write_text('{"*gate_up_proj.weight": {"dim": 1}, "*down_proj.weight": {"dim": 1}}')

    out = run("convert", tmp_path / "old", tmp_path / "a", "--to", "nxd", "--target-tag", "a", *LLAMA)[1]
    wrong = run("convert", tmp_path / "old", tmp_path / "hf", "--to", "hf", "--sharding", rules)[1]

    shapes = f"{MLP}gate_up_proj.weight [32, 4], dimension 0; {MLP}down_proj.weight [4, 16], dimension 1"
    assert f"check the whole shapes: {shapes}. `nxd ckpt inspect` shows all\n" in out
    assert f"check the whole shapes: {MLP}gate_up_proj.weight [16, 8], dimension 1. " in wrong


def test_gc_only_lists_with_dry_run_and_then_frees(run, run_json, root):
    left = root / ".staging" / ("0" * 32)
    left.mkdir(parents=True)
    (left / "part").write_bytes(bytes(1000))

    code, data = run_json("gc", root, "--dry-run")
    assert (code, data["dry_run"]) == (0, True)
    assert data["bytes"] >= 1000
    assert left.exists()
    assert run("gc", root)[0] == 0
    assert not left.exists()
    assert [info.tag for info in list_checkpoints(root)] == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}/nowhere"], "does not exist"),
        (["inspect", "{tmp}/empty"], "it is empty"),
        (["inspect", "{root}", "--tag", "x"], "no checkpoint 'x' in"),
        (["inspect", "{root}", "--tag", "../x"], "tag"),
        (["verify", "{tmp}/nowhere"], "no complete checkpoint"),
        (["verify", "{root}", "--tag", "x"], "no checkpoint 'x'"),
        (["verify", "{tmp}", "--all"], "there is no complete checkpoint in"),
        (["diff", "{root}", "{tmp}/nowhere"], "does not exist"),
        (["diff", "{root}", "{root}", "--include", "nothing"], "none of the 2 tensors remain"),
        (["convert", "{root}", "{tmp}/out", "--to", "nxd"], "needs --target-tag"),
        (["convert", "{root}", "{tmp}/out", "--to", "neuronx-v1"], "needs --sharding"),
        (["convert", "{root}", "s3://b/out", "--to", "hf"], "is a URL"),
        (["convert", "{root}", "{tmp}/junk", "--to", "dcp"], "not empty"),
        (["convert", "{root}", "{tmp}/out", "--to", "hf", "--max-shard-size", "big"], "is not a size"),
        (["convert", "{tmp}/junk", "{tmp}/out", "--to", "hf"], "does not contain a checkpoint in a known format"),
        (["convert", "{root}", "{tmp}/o", "--to", "neuronx-v1", "--sharding", "{tmp}/junk/file"], "is not valid JSON"),
        (["convert", "{root}", "{tmp}/o", "--to", "neuronx-v1", "--sharding", "llama", "--tp", "0"], "use 1 or more"),
        (["convert", "{root}", "{tmp}/o", "--to", "neuronx-v1", "--sharding", "{tmp}/list.json"], "expected {pattern"),
        (["convert", "{root}", "{tmp}/o", "--to", "hf", "--stages", "{tmp}/list.json"], "pipeline rank for each"),
        (["convert", "{root}", "{tmp}/o", "--to", "hf", "--parameter-names", "{tmp}/list.json"], "list of names"),
        (["pin", "{root}", "x"], "no checkpoint 'x'"),
        (["list", "{tmp}/nowhere"], "nowhere' does not exist"),
        (["gc", "{tmp}/nowhere"], "nowhere' does not exist"),
        (["pin", "{tmp}/nowhere", "x"], "nowhere' does not exist"),
        (["unpin", "{tmp}/nowhere", "x"], "nowhere' does not exist"),
        (["list", "{tmp}/list.json"], "is not a folder"),
        (["convert", "{root}", "{tmp}/o", "--to", "neuronx-v2", "--target-tag", "../o", *LLAMA], "is not allowed"),
        (["inspect", "nosuch://x/y"], "nosuch"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_two(run, root, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "file").write_text("junk")
    (tmp_path / "list.json").write_text("[1]")

    code, out, err = run(*(argument.format(root=root, tmp=tmp_path) for argument in arguments))

    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"nxd-ckpt {arguments[0]}: ")
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "junk", "list.json", "runs"]


def test_a_mistake_as_json_is_an_error_object(run_json, tmp_path):
    assert run_json("inspect", tmp_path / "nowhere") == (2, {"error": f"{tmp_path / 'nowhere'} does not exist"})


@pytest.mark.parametrize("file", ["hf/model.safetensors", "dcp/.metadata", "v1/tp_rank_00_pp_rank_00/checkpoint.pt"])
@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00exit\x85R."])
def test_hostile_files_are_one_line_too(run, tmp_path, file, content):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_bytes(content)

    code, out, err = run("inspect", tmp_path / file.partition("/")[0], "--sharding", "llama")

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert Path(file).name in err


def test_an_unknown_command_is_a_usage_error(run):
    with pytest.raises(SystemExit) as exit_:
        run("explode")

    assert exit_.value.code == 2


def test_what_was_converted_keeps_its_objects(run, root, tmp_path):
    run("convert", root, tmp_path / "copy", "--to", "nxd", "--target-tag", "a", "--dtype", "float64")

    assert open_checkpoint(tmp_path / "copy").objects == {"lr": 0.1}


def test_files_of_the_tokenizer_go_along_between_checkpoints_and_hugging_face_folders(run, tmp_path):
    files = {"tokenizer.json": b"{}", "additional_chat_templates/tool_use.jinja": b"x", "generation_config.json": b"[]"}
    extra = as_extra(files) | {"model-.bashrc": b"no such file", "values.json": b"{}"}
    save(tmp_path / "runs", "a", {"w": torch.ones(2)}, extra=extra)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "generation_config.json").write_bytes(b"mine")

    run("convert", tmp_path / "runs", tmp_path / "copy", "--to", "nxd", "--target-tag", "b")
    run("convert", tmp_path / "copy", tmp_path / "hf", "--to", "hf")
    run("convert", tmp_path / "hf", tmp_path / "back", "--to", "nxd", "--target-tag", "c")
    run("convert", tmp_path / "hf" / "model.safetensors", tmp_path / "file", "--to", "nxd", "--target-tag", "d")

    copy = open_checkpoint(tmp_path / "copy")
    assert {name: copy.read_extra(name) for name in copy.extra} == extra
    assert read_companions(tmp_path / "hf") == files | {"generation_config.json": b"mine"}
    assert companions_in(open_checkpoint(tmp_path / "back")) == files | {"generation_config.json": b"mine"}
    assert not open_checkpoint(tmp_path / "file").extra


def test_page_is_one_file_that_shows_every_tensor_and_runs_nothing(run, tmp_path):
    state = {
        "model.<script>alert(1).weight": torch.arange(100.0).reshape(10, 10),
        "model.odd": torch.tensor([float("nan"), 0.0, float("inf")]),
        "flags": torch.tensor([True, False]),
        "nothing": torch.empty(0),
        "z": torch.tensor([3 + 4j]),
    }
    save(tmp_path / "runs", "a", state, step=3, incremental=True)
    save(tmp_path / "runs", "b", state, step=4, incremental=True)

    assert run("page", tmp_path / "runs", "-o", tmp_path / "page.html")[0] == 0

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "float32 [10, 10], 400 B; rank 0; 0 to 99; 1 zeros" in page
    assert "1 zeros; 2 not finite" in page
    assert page.count("<svg") == 2  # the weight and the flags; the others have one value at most
    assert "5 to 5" in page  # a complex number's magnitude
    assert "<td>a</td></tr>" in page  # where the data lies
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]


def test_page_of_another_format_is_written_too(run, root, tmp_path):
    run("convert", root, tmp_path / "hf", "--to", "hf")

    assert run("page", tmp_path / "hf", "-o", tmp_path / "page.html")[0] == 0
    assert "q_proj" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_diff_of_large_tensors_reads_parts_and_counts_all_of_them(run_json, tmp_path):
    first = torch.zeros(3, 3 * 2**20)
    second = first.clone()
    second[0, 0], second[2, -1] = 1.0, -4.0
    for name, value in (("a", first), ("b", second)):
        save(tmp_path / name, "t", {"w": value})

    code, data = run_json("diff", tmp_path / "a", tmp_path / "b")

    assert code == 1
    assert data["different"]["w"] == {
        "elements": 2,
        "of": first.numel(),
        "largest_gap": 4.0,
        "largest_relative_gap": 1.0,
    }
