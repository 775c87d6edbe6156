"""DTensors: where a rank's values are in the whole tensor, and what a module's own hooks make of its output."""

from copy import deepcopy

import torch
from nxd_parity import compare, record
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard


class Gated(nn.Module):
    """A product of the halves of a fused matrix's outputs."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(4, 12, bias=False)
        self.down = nn.Linear(6, 4)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(gate * up)


def train(folder, change=lambda model: None):
    torch.manual_seed(0)
    model = Gated().double()
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with record(folder):
        for step in range(2):
            x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
            optimizer.step()
            optimizer.zero_grad()


def halves_of_both(model, style=RowwiseParallel):
    """Each rank has a half of the gate's rows and one of the others', and computes with local tensors."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(model.gate_up.weight, mesh, [_StridedShard(0, split_factor=2)])
    model.gate_up.weight = nn.Parameter(weight)
    model.gate_up.forward = lambda x: x @ model.gate_up.weight.to_local().T
    parallelize_module(model, mesh, {"down": style()})


def test_strided_shards_are_where_their_placement_says(run_ranks, tmp_path):
    train(tmp_path / "reference")
    run_ranks(lambda: train(tmp_path / "candidate", halves_of_both), 2)

    report = compare(tmp_path / "reference", tmp_path / "candidate")

    assert report.agrees, str(report)
    assert report.not_compared == {}
    assert report.agree["gradient"] == 2 * 3


class PartTakenForTheSum(RowwiseParallel):
    """A mistake in a hook of the module: a rank's part of a sum is called the sum."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, module, output, mesh):
        return DTensor.from_local(output.to_local(), mesh, [Replicate()], run_check=False).to_local()


def test_mistake_in_a_hook_of_a_module_is_in_the_modules_output(run_ranks, tmp_path):
    train(tmp_path / "reference")
    run_ranks(lambda: train(tmp_path / "candidate", lambda model: halves_of_both(model, PartTakenForTheSum)), 2)

    first = compare(tmp_path / "reference", tmp_path / "candidate").first

    assert first is not None
    assert (first.kind, first.name, first.fault) == ("activation", "down", "missing sum")


def test_rows_of_other_parameters_are_named(run_ranks, tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.q(x) * self.k(x)

    def run(folder, *, is_mixed=False):
        torch.manual_seed(0)
        model = Two().double()
        if is_mixed:  # each rank takes its rows of the fused matrix, and then splits it
            fused = torch.cat([model.q.weight, model.k.weight])[[0, 1, 4, 5, 2, 3, 6, 7]].detach()
            model.q.weight, model.k.weight = (nn.Parameter(it.clone()) for it in fused.chunk(2))
        with record(folder):
            model(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
            torch.optim.SGD(model.parameters()).step()

    run(tmp_path / "reference")
    run_ranks(lambda: run(tmp_path / "candidate", is_mixed=True), 2)

    first = compare(tmp_path / "reference", tmp_path / "candidate").first

    assert first is not None
    assert (first.step, first.name, first.fault) == (0, "q.weight", "wrong shard or order")
    assert first.detail == "its rows are those of q.weight, k.weight"


def test_copies_that_are_not_tied_are_named(run_ranks, tmp_path):
    def run(folder, *, is_tied):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        head.weight = embedding.weight if is_tied else nn.Parameter(embedding.weight.detach().clone())
        model = nn.Sequential(embedding, nn.Tanh(), head).double()
        with record(folder):
            model(torch.arange(4)).square().mean().backward()
            torch.optim.SGD(model.parameters()).step()

    run(tmp_path / "reference", is_tied=True)
    run_ranks(lambda: run(tmp_path / "candidate", is_tied=False), 2)

    first = compare(tmp_path / "reference", tmp_path / "candidate").first

    assert first is not None
    assert (first.kind, first.name, first.fault) == ("gradient", "0.weight", "missing sum")
    assert "gradient of 2.weight" in first.detail


def test_copy_of_a_recorded_module_is_its_own(tmp_path):
    model = nn.Linear(2, 2)
    with record(tmp_path / "run"):
        model(torch.ones(1, 2))
        copy = deepcopy(model)
    assert torch.equal(copy(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert not model._forward_hooks
