"""Models for pipelines, the numbers of one process, and what ranks bring together."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

BATCH, SEQ, HIDDEN, VOCAB = 8, 5, 12, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden, mask):
        return hidden + torch.tanh(self.linear(self.norm(hidden))) * mask


class Model(nn.Module):
    """An embedding, layers and a head; returns what `returns` says."""

    def __init__(self, num_layers=4, *, tied=False, skip=False, returns="tensor"):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.skip, self.returns = skip, returns
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids, labels):
        mask = (input_ids > 0).unsqueeze(-1) * self.scale
        hidden = start = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        if self.skip:
            hidden = hidden + start
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"tensor": loss, "tuple": (loss, logits), "dict": {"loss": loss, "logits": logits}}[self.returns]


LOSS_SPECS = {"tensor": None, "tuple": (True, False), "dict": {"loss": True, "logits": False}}


def _make_model(**options):
    torch.manual_seed(3)
    return Model(**options).double()


def _make_batch(seed=0, *, size=BATCH, seq=SEQ):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(VOCAB, (size, seq), generator=generator) for name in ("input_ids", "labels")}


@pytest.fixture
def make_model():
    """A function that makes a float64 model, the same for the same options."""
    return _make_model


@pytest.fixture
def make_batch():
    """A function that makes a batch of tokens and labels, the same for the same seed."""
    return _make_batch


@pytest.fixture
def loss_specs():
    """The `output_loss_value_spec` for each kind of output."""
    return LOSS_SPECS


@pytest.fixture
def layer_class():
    """The class of the model's layers."""
    return Layer
