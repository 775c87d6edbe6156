"""Mistakes of a training loop by hand: layers, microbatches, buckets and clipping of two replicas."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

HIDDEN, VOCABULARY, LENGTH, ROWS, MICROBATCHES = 16, 24, 6, 8, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, fault, rank):
        super().__init__()
        self.fault, self.rank = fault, rank
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)  # the same for the rows of all ranks
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(LENGTH))
        for number, layer in enumerate(self.layers):
            if number == 1 and (self.fault == "skipped" or (self.fault == "skipped on rank 1" and self.rank == 1)):
                continue
            x = layer(x)
            if number == 1 and self.fault == "called again":
                x = layer(x)
        return self.head(x)


def batch(step):
    return torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def train(fault):
    torch.manual_seed(0)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = Model(fault, rank).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for number, rows in enumerate(batch(step).chunk(ranks)[rank].chunk(MICROBATCHES)):
            if fault == "zeroed in between" and number == 1:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / MICROBATCHES
            if fault == "no backward" and number == 1:
                continue
            loss.backward()
        average(model, fault, ranks)
        clip(model, fault)
        optimizer.step()
        optimizer.zero_grad()


def average(model, fault, ranks):
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if ranks > 1 and fault != "not averaged" and not (fault == "last bucket" and name.startswith("head")):
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks


def clip(model, fault):
    """Clip by own code, as no hook sees; all norms are above the limit."""
    gradients = {name: it.grad for name, it in model.named_parameters()}
    norms = {name: it.norm() for name, it in gradients.items()}
    if fault == "norm without embedding":
        del norms["embedding.weight"]
    norm = sum(norms.values()) if fault == "norms added" else torch.stack(list(norms.values())).norm()
    for name, gradient in gradients.items():
        if not (fault == "embedding not clipped" and name == "embedding.weight"):
            gradient.mul_(0.1 / norm)


FAULTS = {
    "skipped": ("activation", "layers.1", "module not called", "layers.1 is not called on ranks 0, 1"),
    "skipped on rank 1": ("activation", "layers.1", "module not called", "layers.1 is not called on rank 1"),
    "called again": ("activation", "layers.1", "module called again", "called 2 times instead of 1 on ranks 0, 1"),
    "zeroed in between": ("gradient", "", "dropped tokens", "the rows of call 1 of the model on ranks 0, 1 are not"),
    "no backward": ("loss", "", "dropped tokens", "the rows of call 2 of the model on ranks 0, 1 are not in it"),
    "last bucket": ("gradient", "head.bias", "missing sum", "on rank 0 only its own rows are in it"),
    "not averaged": ("gradient", "", "missing sum", "on rank 0 only its own rows are in it"),
    "norm without embedding": ("gradient", "", "scaled", "clipped by a norm without embedding"),
    "norms added": ("gradient", "", "scaled", "clipped by the sum of the norms of all parameters"),
    "embedding not clipped": ("gradient", "embedding.weight", "scaled", "after a right backward"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_loop_is_named(compared, fault):
    report = compared(train, fault)

    first = report.first
    assert first is not None
    assert (first.step, first.kind, first.name, first.fault) == (1, *FAULTS[fault][:3]), str(report)
    assert FAULTS[fault][3] in first.detail


def test_loop_without_a_fault_agrees(compared):
    report = compared(train)

    assert report.agrees, str(report)


class Stage(nn.Module):
    """Layers of a pipeline whose second stage begins with the last layer of the first one."""

    def __init__(self, layers, has_embedding, has_head):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if has_embedding else nn.Identity()
        self.layers = nn.ModuleDict(layers)
        self.head = nn.Linear(HIDDEN, VOCABULARY) if has_head else nn.Identity()

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def train_stages(fault):
    torch.manual_seed(0)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    whole = Stage({str(it): Block() for it in range(5)}, has_embedding=True, has_head=True)
    own = {"": [[0, 1, 2], [3, 4]], "two stages": [[0, 1, 2], [2, 3, 4]], "no stage": [[0, 1, 2], [3]]}[fault]
    model = whole
    if ranks > 1:
        model = Stage({str(it): whole.layers[str(it)] for it in own[rank]}, rank == 0, rank == 1)
        model.load_state_dict(whole.state_dict(), strict=False)
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        rows = batch(step)
        x = rows[:, :-1]
        if rank == 1:
            x = torch.empty(*x.shape, HIDDEN, dtype=torch.float64)
            dist.recv(x, 0)
            x.requires_grad_()
        y = model(x)
        if rank == ranks - 1:
            F.cross_entropy(y.flatten(0, 1), rows[:, 1:].flatten()).backward()
            if rank == 1:
                dist.send(x.grad, 0)
        else:
            dist.send(y.detach(), 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("fault", "name", "what"),
    [
        (
            "two stages",
            "layers.2",
            "module called again: layers.2 is called on ranks 0, 1, most modules of its kind",
        ),
        ("no stage", "layers.4", "module not called: no rank has its parameters"),
    ],
)
def test_layer_in_the_wrong_stages_is_named(compared, fault, name, what):
    first = compared(train_stages, fault).first

    assert first is not None
    assert first.name == name
    assert f"{first.fault}: {first.detail}".startswith(what)


def test_stages_without_a_fault_agree(compared):
    report = compared(train_stages)

    assert report.agrees, str(report)
