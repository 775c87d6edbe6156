"""DeepSpeed's consolidated forms, as its documentation and its ds_to_universal.py and zero_to_fp32.py lay them out.

https://www.deepspeed.ai/tutorials/universal-checkpointing and
https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html describe them. ZeRO 1 and 2 have
`{"param": tensor, "cat_dim": 0}` in each file and a `step.pt`; ZeRO 3 has flat tensors, whose shapes are in the model
states, and no `step.pt`. The writers here write what DeepSpeed 0.19.8 was seen to write.
"""

import json
import os
from collections import OrderedDict

import pytest
import torch
from nxd_ckpt import CheckpointError, open_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.interop import open_deepspeed, read_whole

SHAPES = OrderedDict({"0.weight": torch.Size([6, 4]), "0.bias": torch.Size([6])})


def values_of(name):
    generator = torch.Generator().manual_seed(len(name))
    return {key: torch.randn(SHAPES[name], generator=generator) for key in ("fp32", "exp_avg", "exp_avg_sq")}


def write_universal(run, stage):
    folder = run / "global_step5_universal"
    for name in SHAPES:
        (folder / "zero" / name).mkdir(parents=True)
        for key, value in values_of(name).items():
            content = value.flatten() if stage == 3 else {"cat_dim": 0, "param": value}
            torch.save(content, folder / "zero" / name / f"{key}.pt")
        if stage < 3:
            torch.save(torch.tensor(4.0), folder / "zero" / name / "step.pt")
    (run / "latest_universal").write_text(folder.name)
    states = {
        "module": {"running": torch.arange(3.0), "frozen": torch.ones(2)},
        "buffer_names": ["running"],
        "param_shapes": [SHAPES],
        "frozen_param_shapes": {"frozen": torch.Size([2])},
        "global_steps": 5,
        "skipped_steps": 1,
    }
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    torch.save(states, folder / name)
    return folder


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("by", ["folder", "file that names it"])
def test_universal_checkpoint_has_weights_moments_steps_buffers_and_frozen_weights(tmp_path, stage, by):
    folder = write_universal(tmp_path, stage)

    source = open_deepspeed(folder if by == "folder" else tmp_path)

    for name in SHAPES:
        of_name = values_of(name)
        assert torch.equal(read_whole(source, name), of_name["fp32"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(read_whole(source, f"optimizer/{name}/{key}"), of_name[key])
        assert read_whole(source, f"optimizer/{name}/step").item() == 4
    assert torch.equal(read_whole(source, "running"), torch.arange(3.0))
    assert torch.equal(read_whole(source, "frozen"), torch.ones(2))
    assert source.objects == {"step": 4}
    assert len(source.tensors) == 10


def test_command_converts_a_universal_checkpoint_with_its_step(tmp_path, capsys):
    write_universal(tmp_path / "run", 3)

    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "new"), "--to", "nxd", "--target-tag", "start"]) == 0

    checkpoint = open_checkpoint(tmp_path / "new")
    assert checkpoint.step == 4
    assert torch.equal(checkpoint.read("optimizer/0.weight/exp_avg"), values_of("0.weight")["exp_avg"])
    assert "wrote 10 tensors" in capsys.readouterr().out


@pytest.mark.parametrize("has_index", [False, True])
def test_weights_of_zero_to_fp32_are_read_from_one_file_or_by_an_index(tmp_path, has_index):
    for number, name in enumerate(SHAPES):
        torch.save({name: values_of(name)["fp32"]}, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    index = {name: f"pytorch_model-0000{number}-of-00002.bin" for number, name in enumerate(SHAPES)}
    if has_index:
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        torch.save({name: values_of(name)["fp32"] for name in SHAPES}, tmp_path / "pytorch_model.bin")

    source = open_deepspeed(tmp_path)

    assert source.tensors.keys() == SHAPES.keys()
    for name in SHAPES:
        assert torch.equal(read_whole(source, name), values_of(name)["fp32"])


def test_folder_of_a_run_is_refused_with_the_commands_that_consolidate_it(tmp_path, capsys):
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "latest").write_text("global_step5")
    (tmp_path / "global_step5" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x")

    assert main(["inspect", str(tmp_path)]) == 2

    error = capsys.readouterr().err
    at = tmp_path / "global_step5"
    assert f"deepspeed.checkpoint.ds_to_universal --input_folder {at} --output_folder {at}_universal" in error
    assert f"python {tmp_path}/zero_to_fp32.py {tmp_path} {tmp_path}-fp32 -t global_step5" in error
    assert f"nxd-ckpt convert {at}_universal NEW --to nxd" in error


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("file", ["zero/0.weight/exp_avg.pt", "mp_rank_00_model_states.pt", "pytorch_model.bin"])
def test_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path if file == "pytorch_model.bin" else write_universal(tmp_path, 1)
    torch.save({"param": RunsCode()}, folder / file)

    with pytest.raises(CheckpointError, match=r"asks for posix.mkdir, which could run code"):
        open_deepspeed(folder)

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda at: torch.save(torch.zeros(5), at / "zero/0.weight/exp_avg.pt"), r"5 elements, .* \[6, 4\]"),
        (
            lambda at: torch.save({"param": torch.zeros(2, 2)}, at / "zero/0.bias/exp_avg.pt"),
            r"exp_avg of 0.bias is \[2, 2\], but the weight \[6\]",
        ),
        (lambda at: torch.save({"param": "x"}, at / "zero/0.bias/fp32.pt"), "is a str, expected a dense tensor"),
    ],
)
def test_states_that_do_not_fit_are_refused_by_name(tmp_path, break_it, message):
    folder = write_universal(tmp_path, 1)
    break_it(folder)

    with pytest.raises(CheckpointError, match=message):
        open_deepspeed(folder)


def test_frozen_weights_in_parts_are_refused_with_where_to_take_them(tmp_path):
    folder = write_universal(tmp_path, 3)
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    states = torch.load(path)
    states["module"]["frozen"] = torch.zeros(0)
    torch.save(states, path)

    with pytest.raises(CheckpointError, match=r"frozen parameter frozen \[2\] in parts .* weights of zero_to_fp32.py"):
        open_deepspeed(folder)


def test_index_with_a_path_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../a.bin"}}))

    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_deepspeed(tmp_path)
