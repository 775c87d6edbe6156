"""A small model with hand-written tensor parallelism, as many programs have it, and mistakes to switch on."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nxd_parity import compare, record
from torch import nn

VOCABULARY, HIDDEN, BATCH, LENGTH = 40, 16, 4, 9


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _size():
    return dist.get_world_size() if dist.is_initialized() else 1


def _summed(x):
    x = x.clone()
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


class _SumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x, is_summed):
        context.is_summed = is_summed
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return _summed(gradient) if context.is_summed else gradient, None


class _SumInForward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return _summed(x)

    @staticmethod
    def backward(context, gradient):
        return gradient


class Column(nn.Module):
    def __init__(self, inputs, outputs, fault):
        super().__init__()
        self.fault = fault
        whole = torch.randn(outputs, inputs) * 0.2
        self.weight = nn.Parameter(whole.chunk(_size())[_rank()].clone())
        self.bias = nn.Parameter(torch.zeros(outputs // _size()))

    def forward(self, x):
        return F.linear(_SumInBackward.apply(x, self.fault != "no sum in backward"), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, inputs, outputs, fault):
        super().__init__()
        self.fault = fault
        whole = torch.randn(outputs, inputs) * 0.2
        self.weight = nn.Parameter(whole.chunk(_size(), 1)[_rank()].clone())
        self.bias = nn.Parameter(torch.full((outputs,), 0.1))

    def forward(self, x):
        out = F.linear(x, self.weight)
        if self.fault != "no sum in forward":
            out = _SumInForward.apply(out)
        if self.fault == "summed twice":
            out = _SumInForward.apply(out)
        return out + self.bias


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = Column(HIDDEN, 4 * HIDDEN, fault)
        self.down = Row(4 * HIDDEN, HIDDEN, fault)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(fault if index == 1 else "") for index in range(3))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens_of(step):
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def _train(fault="", *, dtype=torch.float64, steps=2):
    """Train on whole batches; the ranks of the default group split the layers."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        model = Model(fault)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            tokens = tokens_of(step)
            if fault == "other data" and _rank() == 1:
                tokens = tokens_of(step + 100)
            if fault == "no update" and step == 1:
                optimizer.param_groups[0]["lr"] = 0.0
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def train():
    """A function that trains the small model, by itself or on the ranks of the default group."""
    return _train


@pytest.fixture
def make_model():
    """A function that makes the small model."""
    return Model


@pytest.fixture
def compared(run_ranks, tmp_path):
    """`compared(train, fault="")`: a report of a program on two ranks against one process, where it is right."""

    def run(train, fault=""):
        def recorded(folder, of_run):
            with record(folder):
                train(of_run)

        recorded(tmp_path / "reference", "")
        run_ranks(recorded, 2, tmp_path / "candidate", fault)
        return compare(tmp_path / "reference", tmp_path / "candidate")

    return run
