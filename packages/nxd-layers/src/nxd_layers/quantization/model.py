"""Quantizing the linear layers of a whole model, and the states of models that torch quantized."""

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.quantization.layers import ParallelLinear, QuantizedLinear, quantize_weight
from nxd_layers.quantization.tensors import QuantizationConfig, default_config, extract_q_scale

Quantize = Callable[[Any, QuantizationConfig], nn.Module]


def _quantized(layer: ParallelLinear, config: QuantizationConfig) -> nn.Module:
    quantize_weight(layer, config)
    return layer


PARALLEL_LINEARS: dict[type[nn.Module], Quantize] = {
    ColumnParallelLinear: _quantized,
    RowParallelLinear: _quantized,
}

_PACKED, _PACKED_DTYPE = "_packed_params._packed_params", "_packed_params.dtype"


def copy_with_metadata(model: nn.Module) -> nn.Module:
    """Return a deep copy that keeps the metadata of its parameters and the process groups that its modules hold."""
    held = [value for module in model.modules() for value in vars(module).values()]
    copied = copy.deepcopy(model, {id(value): value for value in held if isinstance(value, dist.ProcessGroup)})
    for old, new in zip(model.parameters(), copied.parameters(), strict=True):
        vars(new).update(vars(old))
    return copied


def convert(
    module: nn.Module,
    q_config: QuantizationConfig | None = None,
    inplace: bool = False,
    mapping: Mapping[type[nn.Module], Quantize] | None = None,
    include: str | Sequence[str] | None = None,
    modules_to_not_convert: Sequence[str] | None = None,
) -> nn.Module:
    """Quantize the weights of a model's parallel linear layers. Called by all ranks.

    Args:
        module: the model, or one layer. On the meta device only the parameters are exchanged, for a state dict to fill.
        q_config: how to quantize; None: int8 per tensor.
        inplace: change this model; otherwise a copy.
        mapping: for a class of layers, a function that quantizes a layer (and may change it) and returns the layer to
            use; None: `PARALLEL_LINEARS`.
        include: shell patterns of names of layers, or of modules that hold them; None: all.
        modules_to_not_convert: parts of the names of layers that keep their weights.

    Returns:
        The model; or the quantized layer, if `module` is one.

    Raises:
        ValueError: both lists are given, an unsupported way of quantizing, or a layer that cannot be quantized.
    """
    if include is not None and modules_to_not_convert is not None:
        raise ValueError("include and modules_to_not_convert exclude each other; give one of them")
    patterns = [include] if isinstance(include, str) else include
    config, functions = q_config or default_config(), PARALLEL_LINEARS if mapping is None else mapping
    if not inplace:
        module = copy_with_metadata(module)
    if (function := _function_for(module, functions)) is not None:
        return function(module, config)
    converted: dict[nn.Module, nn.Module] = {}  # a layer may have several names
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        function = _function_for(layer, functions)
        if function is None or any(part in name for part in modules_to_not_convert or ()):
            continue
        if patterns is not None and not _is_included(name, patterns):
            continue
        owner, _, attribute = name.rpartition(".")
        if layer not in converted:
            converted[layer] = function(layer, config)
        setattr(module.get_submodule(owner), attribute, converted[layer])
    return module


def _function_for(layer: nn.Module, functions: Mapping[type[nn.Module], Quantize]) -> Quantize | None:
    return next((functions[it] for it in type(layer).__mro__ if it in functions), None)


def _is_included(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the name, or the name of a module around it."""
    parts = name.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatch(it, pattern) for it in around for pattern in patterns)


def quantize_linears(
    float_model: nn.Module,
    inplace: bool = False,
    dtype: torch.dtype = torch.qint8,
    modules_to_not_convert: Sequence[str] | None = None,
    *,
    per_channel: bool = True,
) -> nn.Module:
    """A plain model whose `nn.Linear` layers have quantized weights.

    Its state has `weight`, `scale` and `bias` of each, by which the model of parallel layers that `convert` made is
    filled.

    Args:
        float_model: whole on this process.
        inplace: change this model; else a copy.
        dtype: int8 (or qint8), float8_e4m3fn or float8_e5m2.
        modules_to_not_convert: parts of names of what stays as it is.
        per_channel: a scale for each output; else one for the tensor.

    Raises:
        ValueError: another dtype.
    """
    dtype = torch.int8 if dtype == torch.qint8 else dtype
    if dtype not in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"dtype: {dtype} is not supported to quantize a model; use int8, float8_e4m3fn or float8_e5m2")
    model = float_model if inplace else copy_with_metadata(float_model)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name and not any(part in name for part in modules_to_not_convert or ()):
            owner, _, attribute = name.rpartition(".")
            quantized = QuantizedLinear.from_float(layer, dtype, per_channel=per_channel)
            setattr(model.get_submodule(owner), attribute, quantized)
    return model


def convert_qint8_to_int8_state_dict(state_dict: MutableMapping[str, Any]) -> None:
    """Unpack the layers that torch's dynamic quantization packed: `weight` in int8, `scale` in float32, `bias`.

    Args:
        state_dict: changed in place; that of `quantize_linears` needs no change.
    """
    for prefix in [name.removesuffix(_PACKED_DTYPE) for name in state_dict if name.endswith(_PACKED_DTYPE)]:
        weight, bias = (*state_dict.pop(prefix + _PACKED), None)[:2]
        state_dict[prefix + "weight"] = torch.int_repr(weight)
        state_dict[prefix + "scale"] = extract_q_scale(weight)
        if isinstance(bias, Tensor):
            state_dict[prefix + "bias"] = bias.detach()
        for name in (_PACKED_DTYPE, "zero_point"):
            state_dict.pop(prefix + name, None)
