"""The two models that are measured: one whose steps are matrix products, one whose steps are mostly overhead."""

from dataclasses import dataclass

import torch
from nxd_engine.models import LlamaConfig
from torch import Tensor


@dataclass(frozen=True)
class Size:
    """A model and the batch of its training step."""

    config: LlamaConfig
    batch: int
    sequence: int

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Input ids and labels `[batch, seq]`, the same on every rank."""
        shape = (self.batch, self.sequence + 1)
        tokens = torch.randint(self.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
        return tokens[:, :-1], tokens[:, 1:]

    def __str__(self) -> str:
        c = self.config
        return (
            f"hidden {c.hidden_size}, MLP {c.intermediate_size}, {c.num_hidden_layers} layers, "
            f"{c.num_attention_heads} heads, vocabulary {c.vocab_size}, sequence {self.sequence}, batch {self.batch}, "
            "float32"
        )


LARGE = Size(
    LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    ),
    batch=4,
    sequence=256,
)
TINY = Size(
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    ),
    batch=2,
    sequence=16,
)
