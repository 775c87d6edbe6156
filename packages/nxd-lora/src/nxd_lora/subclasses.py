"""Adapters of subclasses of plain layers whose forward does more than the plain one: scales, norms, counts positions.

A branch beside such a forward would miss the extra work. So the branch is in the weight that the forward reads, `W +
scale * B A`, as if it were merged, which takes the memory of the weight a second time. Word embeddings of transformers
that scale their vectors, the common case, are recognized by the code of their forward: their branch is scaled, too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import torch
from nxd_layers.activation_checkpoint.forward import CheckpointedForward
from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.hf.head_linears import CopiedHeadsLinear
from nxd_layers.hf.transformers_models import is_conv1d
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from torch import Tensor, nn

from nxd_lora.adapter import LayerKind, complete_factor, scale_of
from nxd_lora.config import LoraConfig

_SPLIT_LINEAR = (ColumnParallelLinear, RowParallelLinear, GQAQKVColumnParallelLinear, CopiedHeadsLinear)
_TABLES = (ParallelEmbedding, nn.Embedding)
_PLAIN = {it.forward for it in (*_SPLIT_LINEAR, *_TABLES, nn.Linear, nn.Conv2d)}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Scaled(nn.Embedding):
    embed_scale: Any

    def forward(self, input_ids: Any) -> Any:
        return super().forward(input_ids) * self.embed_scale


class _ScaledInDtype(nn.Embedding):
    embed_scale: Any

    def forward(self, input_ids: Any) -> Any:
        return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)


class _Product(nn.Linear):
    """Falcon's linear layers: they round in other places than `nn.Linear`, and do nothing else."""

    bias: Any

    def forward(self, input: Any) -> Any:
        hidden_states = input @ self.weight.T
        if self.bias is None:
            return hidden_states
        return hidden_states + self.bias


def kind_for_forward(layer: nn.Module, kind: LayerKind) -> LayerKind:
    """Return how to adapt a layer that would be adapted as `kind` if its forward were the plain one."""
    forward = _forward_of(layer)
    if forward == "plain" or isinstance(layer, _SPLIT_LINEAR):
        return kind
    return _scaled(kind) if forward == "scaled" else _in_weight(kind)


def check_forward(name: str, layer: nn.Module, config: LoraConfig) -> None:
    """Check that a layer can be adapted with its own forward.

    Raises:
        ValueError: it cannot; gives the reason.
    """
    if not isinstance(getattr(layer, "weight", None), nn.Parameter | None):
        raise ValueError(
            f"target_modules names {name}, a {type(layer).__name__}, whose weight is computed from others, as by "
            "weight_norm; remove that first (torch.nn.utils.parametrize.remove_parametrizations), or leave "
            f"{name} out of target_modules"
        )
    if _forward_of(layer) != "other":
        return
    what = f"target_modules names {name}, a {type(layer).__name__}, whose forward does more than the plain layer's"
    remedy = f"leave {name} out of target_modules"
    if isinstance(layer, _SPLIT_LINEAR):
        raise ValueError(f"{what}, and whose weight is split, which an adapter would ignore; {remedy}")
    if config.lora_dropout and not isinstance(layer, _TABLES):
        raise ValueError(
            f"{what}: its adapter does not support dropout; set lora_dropout={config.lora_dropout} to 0, or {remedy}"
        )
    if vars(layer).get("forward") is not None:
        raise ValueError(f"{what} and was replaced, so recomputation would ignore the adapter; {remedy}")
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dtype not in _DTYPES or weight.dim() < 2:
        raise ValueError(f"{what}, and whose weight is not a plain floating-point matrix; {remedy}")


def _forward_of(layer: nn.Module) -> Literal["plain", "scaled", "other"]:
    """Classify the forward that a module runs, below any wrapper for recomputation or placement."""
    own: Any = vars(layer).get("forward")
    while own is not None and not hasattr(own, "__func__"):
        own = own.forward if isinstance(own, CheckpointedForward) else getattr(own, "__wrapped__", None)
        if own is None:
            return "other"
    forwards = [vars(it)["forward"] for it in type(layer).__mro__ if "forward" in vars(it)]
    if own is not None and own.__func__ is not forwards[0]:
        return "other"
    if _is_plain(forwards[0]):
        return "plain"
    scaling = any(_has_code_of(forwards[0], it.forward) for it in (_Scaled, _ScaledInDtype))
    return "scaled" if scaling and _is_plain(forwards[1]) else "other"


def _is_plain(forward: Callable[..., Any]) -> bool:
    is_of_conv1d = forward.__qualname__ == "Conv1D.forward" and forward.__module__.startswith("transformers.")
    return forward in _PLAIN or is_of_conv1d or _has_code_of(forward, _Product.forward)


def _has_code_of(forward: Callable[..., Any], other: Callable[..., Any]) -> bool:
    code, known = getattr(forward, "__code__", None), other.__code__
    return code is not None and (code.co_code, code.co_names) == (known.co_code, known.co_names)


@cache
def _scaled(kind: LayerKind) -> LayerKind:
    """Return `kind` with its branch scaled like the vectors."""
    assert kind.output_delta is not None, "embeddings have a separate branch"
    return replace(kind, output_delta=partial(_scaled_delta, kind.output_delta))


def _scaled_delta(delta: Callable[..., Any], layer: Any, ids: Tensor) -> Tensor:
    branch: Tensor = delta(layer, ids)
    scale = layer.embed_scale
    return branch * (scale.to(branch.dtype) if isinstance(scale, Tensor) else scale)


@cache
def _in_weight(kind: LayerKind) -> LayerKind:
    """Return `kind` with its branch in the weight; it has no rows, so DoRA is not supported."""
    return replace(kind, output_delta=None, rows=None, read_weights=_read_weight)


def _read_weight(layer: Any) -> dict[str, Tensor]:
    a, b = complete_factor(layer, 0), complete_factor(layer, 1)
    product = b.flatten(1) @ a.flatten(1)
    if isinstance(layer, _TABLES) or is_conv1d(layer):  # [vocab, hidden] and [in, out]
        product = product.t()
    return {"weight": layer.weight + scale_of(layer) * product.reshape(layer.weight.shape)}
