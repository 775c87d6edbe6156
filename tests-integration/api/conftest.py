"""Models small enough to be trained in one process and in every layout of a test: a Llama, and one of odd sizes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nxd_engine.models import LlamaConfig
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_cross_entropy
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))  # the tests of this folder share modules


@pytest.fixture
def make_config():
    """`make_config(tied=True)`: four layers, whose sizes two and four tensor-parallel ranks divide."""

    def make(*, tied: bool = False) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=48,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )

    return make


VOCABULARY, HEADS, HEAD_SIZE, INTERMEDIATE = 23, 3, 4, 20
HIDDEN = HEADS * HEAD_SIZE
FLOAT64 = {"dtype": torch.float64, "bias": False}


class OddAttention(nn.Module):
    """Of three heads."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=False, **FLOAT64))
        self.o_proj = RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True, **FLOAT64)

    def forward(self, hidden):
        heads = [
            project(hidden).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class OddLayer(nn.Module):
    """Attention, and an MLP that does not come in heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = OddAttention()
        self.up_proj = ColumnParallelLinear(HIDDEN, INTERMEDIATE, gather_output=False, **FLOAT64)
        self.down_proj = RowParallelLinear(INTERMEDIATE, HIDDEN, input_is_parallel=True, **FLOAT64)

    def forward(self, hidden):
        hidden = hidden + self.attention(hidden)
        return hidden + self.down_proj(torch.cos(self.up_proj(hidden)))  # not zero at zero


class OddModel(nn.Module):
    """A language model whose heads and vocabulary no even number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)
        self.table = ParallelEmbedding(VOCABULARY, HIDDEN, dtype=torch.float64, pad=True)
        self.layers = nn.ModuleList(OddLayer() for _ in range(4))
        self.head = ColumnParallelLinear(HIDDEN, VOCABULARY, gather_output=False, pad=True, **FLOAT64)

    def forward(self, input_ids, labels):
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return parallel_cross_entropy(self.head(hidden), labels, vocab_size=VOCABULARY).mean()


@pytest.fixture
def odd_model():
    """`odd_model.make()` needs padding above one tensor-parallel rank; its layers are of class `layer_cls`."""
    return SimpleNamespace(make=OddModel, layer_cls=OddLayer)
