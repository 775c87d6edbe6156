"""Pipelines whose stages count their layers from 0: names are found by initial values, and faults by these names."""

import pytest
import torch
import torch.distributed as dist
from nxd_parity.recording import Recording
from torch import nn

HIDDEN, CLASSES, ROWS, MICROBATCHES = 8, 12, 8, 2


class Layers(nn.Module):
    def __init__(self, layers, head):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), head

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.head is None else self.head(x)


def exchange(tensor, peer, *, is_sent, as_batch):
    function = dist.isend if is_sent else dist.irecv
    works = dist.batch_isend_irecv([dist.P2POp(function, tensor, peer)]) if as_batch else [function(tensor, peer)]
    for work in works:
        work.wait()


def train(fault=""):
    """Train for two steps: two layers and a head, or on two ranks a stage with a layer each."""
    torch.manual_seed(0)
    layers, head = [nn.Linear(HIDDEN, HIDDEN) for _ in range(2)], nn.Linear(HIDDEN, CLASSES)
    for layer in layers:
        nn.init.zeros_(layer.bias)  # which layer's it is only the weights tell
    rank = dist.get_rank() if dist.is_initialized() else None
    if rank is not None:
        last = layers[0] if fault == "layer" else layers[1]
        model = (Layers([last], head) if rank else Layers(layers[:1], None)).double()
    else:
        model = Layers(layers, head).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for step in range(2):
        x = torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        labels = torch.arange(ROWS)
        if fault == "labels":
            labels = labels.flip(0)
        if rank is None:
            nn.functional.cross_entropy(model(x), labels).backward()
        for number in range(0 if rank is None else MICROBATCHES):
            rows, some_labels = x.chunk(MICROBATCHES)[number], labels.chunk(MICROBATCHES)[number]
            if rank == 0:
                y = model(rows)
                exchange(y.detach(), 1, is_sent=True, as_batch=number == 0)
                exchange(gradient := torch.empty_like(y), 1, is_sent=False, as_batch=number == 0)
                y.backward(gradient)
            else:
                exchange(y := torch.empty(len(rows), HIDDEN).double(), 0, is_sent=False, as_batch=number == 0)
                loss = nn.functional.cross_entropy(model(y.requires_grad_()), some_labels) / MICROBATCHES
                loss.backward()
                exchange(y.grad, 0, is_sent=True, as_batch=number == 0)
        if fault == "gradient" and rank == 1:
            model.layers[0].weight.grad = None
        norm = nn.utils.get_total_norm([it.grad for it in model.parameters() if it.grad is not None])
        if rank is not None and fault != "norm":
            norm = norm.square()
            dist.all_reduce(norm)
            norm = norm.sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        optimizer.step()
        optimizer.zero_grad()


def test_names_of_stages_are_inferred(compared, tmp_path):
    report = compared(train)

    assert report.agrees, str(report)
    assert report.agree["parameter"] == 3 * 6
    assert report.agree["activation"] == 2 * 3
    assert [it for it in report.not_compared if "gradient" not in it] == ["step 1, activation", "step 2, activation"]
    assert "layers.0.weight of rank 1: it is layers.1.weight" in "".join(report.notes)
    messages = [it for it in Recording(tmp_path / "candidate").collectives[1] if it.ranks == (1, 0)]
    assert [it.operation for it in messages] == ["irecv", "isend"] * 2 * MICROBATCHES
    assert {it.shape for it in messages} == {(ROWS // MICROBATCHES, HIDDEN)}


FAULTS = {
    "layer": (0, "parameter", "layers.1", "module not called", "no rank has its parameters"),
    "labels": (1, "loss", "", "different data", "as with other labels"),
    "gradient": (1, "gradient", "layers.1.weight", "missing term", "no rank has one"),
    "norm": (1, "gradient norm", "", "missing sum", "parts of a sum"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_stages_is_located(compared, fault):
    first = compared(train, fault).first

    assert first is not None
    assert (first.step, first.kind, first.name, first.fault) == FAULTS[fault][:4]
    assert FAULTS[fault][4] in first.detail
