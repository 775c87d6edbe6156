"""The model and the data that the documents' samples are filled in with."""

import torch
from nxd_engine.models import LlamaConfig

SIZES = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
)


def tokens(length: int) -> torch.Tensor:
    """Four sequences of that length, the same at each call."""
    return torch.randint(0, SIZES.vocab_size, (4, length), generator=torch.Generator().manual_seed(1))
