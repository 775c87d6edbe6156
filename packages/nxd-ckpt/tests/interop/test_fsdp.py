"""What three ranks of FSDP2 saved, read with the names and values of one process that trained alone."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nxd_ckpt import CheckpointError, open_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.interop import open_fsdp, read_whole
from torch.distributed import checkpoint as dcp

RANKS = 3
WITH_STATES = ("torch", "recipe", "torchtitan", "accelerate", "accelerate, whole")
WEIGHTS = {"a.weight": torch.arange(24.0).reshape(6, 4), "a.bias": torch.ones(6)}
STATES = {name: {"exp_avg": 2 * weight, "step": torch.tensor(3.0)} for name, weight in WEIGHTS.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folders that `fsdp_rank.py` names."""
    folder = tmp_path_factory.mktemp("fsdp")
    command = [sys.executable, str(Path(__file__).with_name("fsdp_rank.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(RANKS)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(outputs)
    return folder


@pytest.fixture(scope="module")
def alone(saved) -> tuple[dict, dict]:
    """Weights and states of one process."""
    return torch.load(saved / "alone.pt")


def check_equal(source, expected):
    assert source.tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(read_whole(source, name), value)


@pytest.mark.parametrize("form", WITH_STATES)
def test_weights_and_states_of_several_ranks_are_those_of_one_process(saved, alone, form):
    weights, states = alone

    source = open_fsdp(saved / form)

    assert len(states) == 12  # of four parameters; the frozen ones have none
    check_equal(source, weights | states)


@pytest.mark.parametrize("form", ["weights", "weights at the top"])
def test_weights_alone_have_the_names_of_the_model(saved, alone, form):
    check_equal(open_fsdp(saved / form), alone[0])


def test_values_beside_the_tensors_are_kept_as_objects(saved):
    assert open_fsdp(saved / "torch").objects["step"] == 2
    assert open_fsdp(saved / "torchtitan").objects["train_state.step"] == 2


def test_command_recognizes_what_accelerate_wrote_and_converts_it(saved, alone, tmp_path):
    assert main(["convert", str(saved / "accelerate"), str(tmp_path / "new"), "--to", "nxd", "--target-tag", "a"]) == 0

    checkpoint = open_checkpoint(tmp_path / "new", "a")
    for name, value in {**alone[0], **alone[1]}.items():
        torch.testing.assert_close(checkpoint.read(name), value)


def write(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"model": {"model.a.weight": WEIGHTS["a.weight"]}}, {"model.a.weight"}),
        ({"model.a.weight": WEIGHTS["a.weight"]}, {"model.a.weight"}),  # a model of transformers without a head
        ({"net": WEIGHTS}, {"a.weight", "a.bias"}),
        ({"model": {"state.a.weight": torch.ones(2), "b": torch.ones(2)}}, {"state.a.weight", "b"}),
        ({"model": WEIGHTS, "model_ema": WEIGHTS}, {"a.weight", "a.bias"}),
        ({"model": {"encoder": WEIGHTS}}, {"encoder.a.weight", "encoder.a.bias"}),
        ({**WEIGHTS, "optimizer": {"param_groups.a.weight.lr": torch.tensor(0.1)}}, {"a.weight", "a.bias"}),
        ({"step": 3}, set()),
    ],
)
def test_names_are_those_below_the_key_that_the_script_chose(tmp_path, state, names):
    assert open_fsdp(write(tmp_path / "x", state)).tensors.keys() == names


def test_dict_that_has_the_owners_of_states_is_the_model(tmp_path):
    state = {"model": {"b": torch.ones(1)}, "net": {**WEIGHTS, "buffer": torch.ones(1)}, "optim": {"state": STATES}}

    names = open_fsdp(write(tmp_path / "x", state)).tensors.keys()

    states = {f"optimizer/{name}/{key}" for name in WEIGHTS for key in ("exp_avg", "step")}
    assert names == {"a.weight", "a.bias", "buffer"} | states


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("owner", "weights"), [("c.weight", WEIGHTS), ("0", WEIGHTS), ("a.weight", {"a.bias": WEIGHTS["a.bias"]})]
)
def test_states_without_their_weight_are_refused_by_name(tmp_path, owner, weights, flat):
    """Numbers are what `optimizer.state_dict()` has."""
    key = int(owner) if owner.isdigit() else owner
    states = {f"state.{owner}.exp_avg": torch.ones(2)} if flat else {"state": {key: {"exp_avg": torch.ones(2)}}}
    folder = write(tmp_path / "x", {"model": weights, "optim": states})

    with pytest.raises(CheckpointError, match=rf"x holds optimizer states of '{owner}', but no weight of that name"):
        open_fsdp(folder)


def read_all(folder):
    source = open_fsdp(folder)
    return {name: read_whole(source, name) for name in source.tensors}


def without(folder, name):
    shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


@pytest.mark.parametrize(
    ("form", "damage", "message"),
    [
        ("torch", lambda at: without(at, ".metadata"), r"holds neither \.metadata nor .*; pass the folder"),
        ("weights", lambda at: without(at, "__1_0.distcp"), r"__1_0\.distcp cannot be read: No such file"),
        ("weights", lambda at: os.truncate(at / "__2_0.distcp", 300), r"__2_0\.distcp ends early"),
        ("torch", lambda at: os.truncate(at / ".metadata", 300), r"\.metadata is damaged"),
        (
            "accelerate",
            lambda at: without(at, "optimizer_0/.metadata"),
            r"optimizer_0 holds no \.metadata",
        ),
        ("accelerate", lambda at: without(at, "pytorch_model_fsdp_0/.metadata"), r"holds neither .* pass the folder"),
        ("accelerate, whole", lambda at: os.truncate(at / "optimizer.bin", 300), r"optimizer\.bin cannot be read"),
        (
            "accelerate, whole",
            lambda at: torch.save({"a": [1]}, at / "pytorch_model_fsdp.bin"),
            r"'a' in .*pytorch_model_fsdp\.bin is a list, expected a dense tensor",
        ),
        (
            "accelerate, whole",
            lambda at: torch.save([1], at / "pytorch_model_fsdp.bin"),
            r"pytorch_model_fsdp\.bin holds a list, expected a dict of names",
        ),
        (
            "accelerate, whole",
            lambda at: torch.save({"state": {0: {"exp_avg": torch.ones(1)}}}, at / "optimizer.bin"),
            r"optimizer\.bin has the states of 0; expected a parameter's name",
        ),
        (
            "accelerate, whole",
            lambda at: torch.save({"state": {"b": {"exp_avg": torch.ones(1)}}}, at / "optimizer.bin"),
            r"holds optimizer states of 'b', but no weight of that name",
        ),
        (
            "accelerate, whole",
            lambda at: torch.save({}, at / "optimizer.bin"),
            r"optimizer\.bin holds a NoneType as states, expected a dict",
        ),
    ],
)
def test_damaged_or_incomplete_folder_is_refused_by_file(saved, tmp_path, form, damage, message):
    folder = tmp_path / "copy"
    shutil.copytree(saved / form, folder)
    damage(folder)

    with pytest.raises(CheckpointError, match=message):
        read_all(folder)


@pytest.mark.parametrize(
    "file", ["torch/.metadata", "accelerate, whole/pytorch_model_fsdp.bin", "accelerate, whole/optimizer.bin"]
)
def test_file_that_would_run_code_is_refused_and_runs_nothing(saved, tmp_path, bomb, exploded, file):
    form, _, name = file.partition("/")
    shutil.copytree(saved / form, tmp_path / "copy")
    dump = torch.save if name.endswith(".bin") else lambda value, path: path.write_bytes(pickle.dumps(value))
    dump(bomb, tmp_path / "copy" / name)

    with pytest.raises(CheckpointError, match=r"asks for posix\.system"):
        open_fsdp(tmp_path / "copy")

    assert not exploded()


def test_metadata_that_makes_python_allocate_what_it_does_not_hold_is_refused(tmp_path):
    write(tmp_path / "x", {"model": WEIGHTS})
    content = (tmp_path / "x" / ".metadata").read_bytes()
    numbered = b"r" + (2**31).to_bytes(4, "little")  # 64 GiB: value number 2**31 of the pickle
    (tmp_path / "x" / ".metadata").write_bytes(content[:-1] + numbered + b".")

    with pytest.raises(CheckpointError, match=r"it numbers a value 2147483648, but has only \d+ bytes"):
        open_fsdp(tmp_path / "x")
