"""Attention over a compressed cache (multi-head latent attention, DeepSeek-AI 2024), with its heads split.

One projection makes both the compressed keys and values, the input of a column-parallel layer, and the part of the
keys with positions, which all heads use unchanged: its gradient is a sum over the heads of all ranks.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nxd_layers.hf.transformers_models import text_config
from nxd_layers.mappings import copy_to_tensor_model_parallel_region


class _Target(Protocol):
    @property
    def model(self) -> nn.Module: ...

    @property
    def path(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...


def apply(target: _Target) -> None:
    """Sum the gradients of the last `config.qk_rope_head_dim` outputs of the projection.

    Raises:
        ValueError: the config has no `qk_rope_head_dim`.
    """
    length = getattr(text_config(target.model), "qk_rope_head_dim", None)
    if not isinstance(length, int):
        raise ValueError(f"{target.path}: the style mla_kv_a_proj needs config.qk_rope_head_dim, which is {length!r}")

    def with_summed_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        compressed, positional = output.split([output.shape[-1] - length, length], dim=-1)
        return torch.cat([compressed, copy_to_tensor_model_parallel_region(positional)], dim=-1)

    target.module.register_forward_hook(with_summed_gradient)
