"""References of several ranks: each rank is compared with the same one."""

import pytest
import torch
from nxd_parity import compare, record
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def recorded(folder, function, *given, noise=None, **named):
    with record(folder, noise=noise):
        function(*given, **named)


@pytest.fixture
def reference(run_ranks, tmp_path, train):
    """A recording of two ranks, in float64."""
    run_ranks(recorded, 2, tmp_path / "reference", train)
    return tmp_path / "reference"


def test_two_runs_at_one_layout_agree(run_ranks, tmp_path, reference, train, make_model):
    run_ranks(recorded, 2, tmp_path / "candidate", train)

    report = compare(reference, tmp_path / "candidate")

    assert report.agrees, str(report)
    assert (report.ranks, report.steps, report.not_compared) == (2, 2, {})
    assert report.agree["gradient"] == 2 * len(list(make_model().parameters()))
    assert "each rank was compared with the same rank of the reference" in report.notes


@pytest.mark.parametrize(
    ("fault", "kind", "name", "what"),
    [
        ("no sum in forward", "activation", "blocks.1.down", "missing sum"),
        ("no sum in backward", "activation gradient", "blocks.1.up", "missing sum"),
        ("summed twice", "activation", "blocks.1.down", "summed twice"),
    ],
)
def test_a_fault_of_all_ranks_is_located(run_ranks, tmp_path, reference, train, fault, kind, name, what):
    run_ranks(recorded, 2, tmp_path / "candidate", train, fault)

    report = compare(reference, tmp_path / "candidate")

    first = report.first
    assert first is not None
    assert (first.step, first.kind, first.name, first.fault, first.ranks) == (1, kind, name, what, (0, 1))
    assert report.tensors[1][kind][first.shown_in] == "differs first"


def test_a_fault_of_one_rank_is_located_there(run_ranks, tmp_path, reference, train):
    run_ranks(recorded, 2, tmp_path / "candidate", train, "other data")

    first = compare(reference, tmp_path / "candidate").first

    assert first is not None
    assert (first.step, first.kind, first.fault, first.ranks) == (1, "input", "different data", (1,))


def test_bfloat16_is_compared_with_the_spread_of_as_many_ranks(run_ranks, tmp_path, train):
    for number, folder in enumerate(("reference", "noise-1", "noise-2")):
        noise = number or None
        run_ranks(lambda f=folder, n=noise: recorded(tmp_path / f, train, dtype=torch.bfloat16, noise=n), 2)
    run_ranks(lambda: recorded(tmp_path / "same", train, dtype=torch.bfloat16, noise=7), 2)
    run_ranks(lambda: recorded(tmp_path / "wrong", train, "no sum in backward", dtype=torch.bfloat16), 2)
    spread = [tmp_path / "noise-1", tmp_path / "noise-2"]

    assert compare(tmp_path / "reference", tmp_path / "same", spread=spread).agrees
    first = compare(tmp_path / "reference", tmp_path / "wrong", spread=spread).first

    assert first is not None
    assert (first.step, first.name, first.fault) == (1, "blocks.1.up", "missing sum")


def train_sharded(*, lr=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(2):
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(rows.chunk(2)[torch.distributed.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_shards_of_fsdp2_are_compared_rank_by_rank(run_ranks, tmp_path):
    run_ranks(recorded, 2, tmp_path / "reference", train_sharded)
    run_ranks(recorded, 2, tmp_path / "same", train_sharded)
    run_ranks(lambda: recorded(tmp_path / "other", train_sharded, lr=0.2), 2)

    assert compare(tmp_path / "reference", tmp_path / "same").agrees
    first = compare(tmp_path / "reference", tmp_path / "other").first

    assert first is not None
    assert (first.step, first.kind, first.fault, first.factor) == (1, "parameter", "scaled", pytest.approx(2, rel=0.1))


def test_a_reference_of_another_number_of_ranks_is_refused(run_ranks, tmp_path, reference, train):
    run_ranks(recorded, 1, tmp_path / "candidate", train)

    with pytest.raises(
        ValueError, match=r"a recording of 2 ranks, .*candidate of 1; record the reference in one process"
    ):
        compare(reference, tmp_path / "candidate")
