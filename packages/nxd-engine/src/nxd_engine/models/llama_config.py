"""The sizes of a Llama and its rotary positions (Su et al. 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from nxd_layers.hf.transformers_models import rope_frequencies
from torch import Tensor


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; the names are those of a Hugging Face `config.json`."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    max_position_embeddings: int = 4096  # longest sequence the model is made for
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False  # the head is the embedding table
    initializer_range: float = 0.02  # standard deviation of the initial weights
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)  # rope_type and its settings

    @property
    def rope_type(self) -> str:
        """How rotary frequencies are made: "default", or as transformers names it."""
        return "default" if self.rope_scaling is None else str(self.rope_scaling["rope_type"])

    @property
    def head_size(self) -> int:
        """Length of each head's vectors."""
        return self.hidden_size // self.num_attention_heads

    def check(self, tensor_parallel_size: int) -> None:
        """Check that the sizes fit each other and the tensor-parallel degree.

        Raises:
            ValueError: naming every size that does not divide, and the degrees that would work.
        """
        positive = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        mistakes = [f"{name}={getattr(self, name)} must be positive" for name in positive if getattr(self, name) < 1]
        if self.num_hidden_layers > 10_000:  # layers are made one by one; configs may come from strangers
            mistakes.append(f"num_hidden_layers={self.num_hidden_layers} must be at most 10000")
        if mistakes:
            raise ValueError("; ".join(mistakes))
        if self.hidden_size % self.num_attention_heads or self.head_size % 2:
            mistakes.append(
                f"hidden_size={self.hidden_size} must be num_attention_heads={self.num_attention_heads} "
                "times an even head size"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            mistakes.append(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        split = ("num_attention_heads", "intermediate_size", "vocab_size")
        for name in split:
            size = getattr(self, name)
            if size % tensor_parallel_size:
                mistakes.append(f"tensor_parallel_size={tensor_parallel_size} does not divide {name}={size}")
        if mistakes:
            usable = [d for d in range(1, 65) if all(getattr(self, name) % d == 0 for name in split)]
            raise ValueError("; ".join(mistakes) + f". Degrees that divide all sizes: {usable}")


def rotary_tables(positions: Tensor, longest: int, config: LlamaConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[S, D]`, in the dtype and on the device of `like`."""
    # float32 as in the original, whatever the model's dtype.
    if config.rope_type == "default":
        exponents = torch.arange(0, config.head_size, 2, device=like.device, dtype=torch.float32) / config.head_size
        frequencies, scaling = config.rope_theta**-exponents, 1.0  # [D/2]
    else:
        values, scaling = _scaled_frequencies(config, _effective_length(config, longest))
        frequencies = torch.tensor(values, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions.to(like.device, torch.float32), frequencies)  # [S, D/2]
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scaling).to(like.dtype), (angles.sin() * scaling).to(like.dtype)


def long_rope_from(config: LlamaConfig) -> int | None:
    """The length above which sequences use the long frequencies of type "longrope"; None for other types."""
    if config.rope_type != "longrope" or config.rope_scaling is None:
        return None
    return int(config.rope_scaling.get("original_max_position_embeddings", config.max_position_embeddings))


def _effective_length(config: LlamaConfig, length: int) -> int:
    """A length that is equal for all sequences with the same frequencies."""
    if config.rope_type == "dynamic":
        return max(length, config.max_position_embeddings)
    border = long_rope_from(config)
    return 0 if border is None else border + int(length > border)


def check_rope(config: LlamaConfig) -> None:
    """Raise for invalid rotary settings now, where they are the caller's mistake, and not in the first forward."""
    if config.rope_type != "default":
        for length in (1, config.max_position_embeddings):
            _scaled_frequencies(config, _effective_length(config, length))


@cache
def _scaled_frequencies(config: LlamaConfig, length: int) -> tuple[tuple[float, ...], float]:
    sizes = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_theta": config.rope_theta, **(config.rope_scaling or {})},
    }
    return rope_frequencies(sizes, length)


def rotate(x_bnsd: Tensor, cos_sd: Tensor, sin_sd: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of a head's elements by its position's angle (Su et al. 2021)."""
    first, second = x_bnsd.chunk(2, dim=-1)
    return torch.addcmul(x_bnsd * cos_sd, torch.cat([-second, first], dim=-1), sin_sd)
