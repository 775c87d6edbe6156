"""Lines that a user writes to save and to load, beside torch's distributed checkpoint: those of the site."""

import inspect
from pathlib import Path

import nxd_ckpt
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_trainers_of_torch import TRAINERS, made, train_steps, whole
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "checkpoint-promises.md"


def save(folder, model, optimizer):
    nxd_ckpt.save(folder, "a", {"model": model, "optimizer": optimizer})


def load(folder, model, optimizer):
    nxd_ckpt.load(folder, into={"model": model, "optimizer": optimizer})


def dcp_save(folder, model, optimizer):
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def dcp_load(folder, model, optimizer):
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def saved_and_loaded(trainer, folder):
    dist.init_process_group("gloo") if not dist.is_initialized() else None
    model, optimizer = made(trainer, dist.get_world_size())
    train_steps(trainer, model, optimizer, range(1))
    save(folder / "ours", model, optimizer)
    dcp_save(folder / "torch", model, optimizer)
    expected = [whole(parameter) for parameter in model.parameters()]
    for read, place in ((load, "ours"), (dcp_load, "torch")):
        other, other_optimizer = made(trainer, dist.get_world_size())
        read(folder / place, other, other_optimizer)
        found = [whole(parameter) for parameter in other.parameters()]
        assert all(torch.equal(one, it) for one, it in zip(found, expected, strict=True)), place
    return True


@pytest.mark.parametrize(
    "trainer", [pytest.param(name, marks=() if name == "FSDP2 x TP" else pytest.mark.slow) for name in TRAINERS]
)
def test_each_trainer_saves_and_loads_in_the_lines_that_are_counted(run_ranks, tmp_path, trainer):
    assert run_ranks(saved_and_loaded, 2, trainer, tmp_path) == [True, True]


def test_lines_on_the_page_are_those_of_the_code():
    lines = [len(inspect.getsource(code).splitlines()) - 1 for code in (save, load, dcp_save, dcp_load)]

    row = next(line for line in PAGE.read_text().splitlines() if line.startswith("| plain, DDP, FSDP2"))
    assert [int(cell) for cell in row.strip(" |").split("|")[1:]] == lines
