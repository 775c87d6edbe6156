"""Programs whose ranks call other collectives than one another, or sum over the wrong ranks, in processes that die."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from nxd_parity import compare, record
from nxd_parity.recording import Recording
from torch import nn

PROGRAM = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce  # by its name
from nxd_parity import record

rank, size, folder, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
group = None
if size > 1:
    limit = timedelta(seconds=8)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{fault}", rank=rank, world_size=size, timeout=limit
    )
    groups = [dist.new_group([first, first + 1], timeout=limit) for first in range(0, size, 2)]
    group = groups[rank // 2]
is_faulty = rank == size - 1


class Layer(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.linear = name, nn.Linear(4, 4)

    def forward(self, x):
        out = self.linear(x)
        at = f"{fault} in {self.name}" if is_faulty else ""
        if size == 1 or at == "left out in first":
            return out
        if at == "killed in second":
            os.kill(os.getpid(), signal.SIGKILL)
        if at == "another operation in second":
            dist.all_gather([torch.empty_like(out) for _ in range(2)], out.detach(), group=group)
            return out
        mean = out.detach().clone()
        all_reduce(mean, group=group)
        return out + (mean / 2 - out.detach())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer("first"), Layer("second")

    def forward(self, x):
        return self.second(self.first(x))


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with record(f"{folder}/{fault}" if size > 1 else f"{folder}/reference"):
    for step in range(2):
        model(torch.full((2, 4), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def run_program(tmp_path):
    """Runs the program with a fault on some ranks, after one process; returns the report of both."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def run(fault, ranks):
        for size in (1, ranks):
            arguments = [str(size), str(tmp_path), fault]
            processes = [subprocess.Popen([sys.executable, script, str(rank), *arguments]) for rank in range(size)]
            try:
                for process in processes:
                    process.wait(120)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        return compare(tmp_path / "reference", tmp_path / fault)

    return run


def test_ranks_that_call_the_same_collectives_agree(run_program):
    report = run_program("none", 4)

    assert report.agrees, str(report)


def test_rank_that_calls_another_collective_is_named_with_both_calls(run_program):
    first = run_program("another operation", 2).first

    assert (first.step, first.name, first.fault) == (1, "second", "collectives in different orders")
    assert first.detail == (
        "collective 2 of the group of ranks 0, 1: rank 0 calls all_reduce SUM of float64 [2, 4] over ranks 0, 1 in "
        "second, rank 1 calls all_gather of float64 [2, 4] over ranks 0, 1 in second"
    )


def test_rank_that_leaves_out_a_collective_is_named_by_the_module(run_program):
    first = run_program("left out", 4).first

    assert (first.name, first.fault, first.ranks) == ("first", "collectives in different orders", (2, 3))
    assert "over ranks 2, 3 in first, rank 3 calls all_reduce" in first.detail
    assert first.detail.endswith("over ranks 2, 3 in second")


def test_rank_that_is_killed_leaves_a_recording_that_says_where(run_program, tmp_path):
    first = run_program("killed", 2).first

    assert (first.name, first.fault) == ("second", "collectives in different orders")
    assert first.detail.endswith("in second, rank 1 calls none, and was killed")
    assert Recording(tmp_path / "killed").ends == ("raised", "")


class Sparse(nn.Module):
    """Ranks exchange different numbers of rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if dist.get_world_size() > 1:
            rank = dist.get_rank()
            sent, received = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
            dist.all_to_all_single(torch.empty(sum(received), 4), torch.ones(sum(sent), 4), received, sent)
        return self.linear(x)


def _train(model, backward):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 4)
        if backward is not None:
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
        model(x).square().mean().backward()
        if backward is not None:
            backward(model)
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)


def _recorded(folder, model, backward=None):
    with record(folder):
        _train(model, backward)


def test_exchanges_of_different_sizes_are_no_other_order(run_ranks, tmp_path):
    run_ranks(_recorded, 1, tmp_path / "reference", Sparse)
    run_ranks(_recorded, 2, tmp_path / "candidate", Sparse)

    assert compare(tmp_path / "reference", tmp_path / "candidate").agrees


def _layer():
    return nn.Linear(4, 3)


def _only_weight(model):
    dist.all_reduce(model.weight.grad)
    model.weight.grad /= dist.get_world_size()


def test_gradient_that_nobody_sums_is_one_that_no_collective_adds_up(run_ranks, tmp_path):
    run_ranks(_recorded, 1, tmp_path / "reference", _layer)
    run_ranks(_recorded, 2, tmp_path / "candidate", _layer, _only_weight)

    first = compare(tmp_path / "reference", tmp_path / "candidate").first

    assert (first.name, first.fault) == ("bias", "missing sum")
    assert first.detail.endswith(
        "no recorded collective adds up a tensor of [3] over ranks 0, 1, unless in a bucket with others"
    )


def _within_pairs(model):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=groups[dist.get_rank() // 2])
        parameter.grad /= dist.get_world_size()


def test_sum_over_the_wrong_group_is_named_with_the_right_one(run_ranks, tmp_path):
    run_ranks(_recorded, 1, tmp_path / "reference", _layer)
    run_ranks(_recorded, 4, tmp_path / "candidate", _layer, _within_pairs)

    first = compare(tmp_path / "reference", tmp_path / "candidate").first

    assert first.fault == "missing sum"
    assert "it is to be added up over ranks 0, 2; recorded is all_reduce SUM of float64" in first.detail
    assert "over ranks 0, 1 outside the model" in first.detail


def test_sum_that_runs_twice_is_counted(run_ranks, tmp_path, train):
    def run(folder, fault):
        with record(folder):
            train(fault, steps=1)

    run_ranks(run, 1, tmp_path / "reference", "")
    run_ranks(run, 2, tmp_path / "candidate", "summed twice")

    first = compare(tmp_path / "reference", tmp_path / "candidate").first

    assert first.fault == "summed twice"
    assert "recorded 2 x all_reduce SUM of float64 [4, 8, 16] over ranks 0, 1 in blocks.1.down" in first.detail
