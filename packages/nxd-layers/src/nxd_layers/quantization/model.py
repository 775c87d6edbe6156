"""Quantizing the linear layers of a whole model, and the states of models that torch quantized."""

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxd_layers.linear import ColumnParallelLinear
from nxd_layers.quantization.layers import QuantizedColumnParallel, QuantizedLinear, QuantizedRowParallel
from nxd_layers.quantization.tensors import QuantizationConfig, default_config, extract_q_scale
from nxd_layers.row_linear import RowParallelLinear

MODULE_MAPPINGS: dict[type[nn.Module], Any] = {
    ColumnParallelLinear: QuantizedColumnParallel,
    RowParallelLinear: QuantizedRowParallel,
}

_PACKED, _PACKED_DTYPE = "_packed_params._packed_params", "_packed_params.dtype"


def _copy(model: nn.Module) -> nn.Module:
    """A copy with the metadata of its parameters, which talks over the process groups that modules hold."""
    held = [value for module in model.modules() for value in vars(module).values()]
    copied = copy.deepcopy(model, {id(value): value for value in held if isinstance(value, dist.ProcessGroup)})
    for old, new in zip(model.parameters(), copied.parameters(), strict=True):
        vars(new).update(vars(old))
    return copied


def convert(
    module: nn.Module,
    q_config: QuantizationConfig | None = None,
    inplace: bool = False,
    mapping: Mapping[type[nn.Module], Any] | None = None,
    include: str | Sequence[str] | None = None,
    modules_to_not_convert: Sequence[str] | None = None,
) -> nn.Module:
    """A model whose parallel layers have quantized weights. Called by all ranks.

    Args:
        module: values are quantized; on the meta device only the layers are exchanged, for a state to fill them.
        q_config: how; int8 per tensor if None.
        inplace: change this model; else a copy.
        mapping: for a class of layers, the class whose `from_float` takes one; `MODULE_MAPPINGS` if None.
        include: shell patterns of names of layers, or of modules that hold them; all if None.
        modules_to_not_convert: parts of names of what stays as it is.

    Returns:
        The model; or the quantized layer, where `module` is one.

    Raises:
        ValueError: both lists are given, or a way of quantizing that is not supported.
    """
    if include is not None and modules_to_not_convert is not None:
        raise ValueError("include and modules_to_not_convert exclude each other; give one of them")
    patterns = [include] if isinstance(include, str) else include
    config, classes = q_config or default_config(), MODULE_MAPPINGS if mapping is None else mapping
    if not inplace:
        module = _copy(module)
    if type(module) in classes:
        quantized: nn.Module = classes[type(module)].from_float(module, config)
        return quantized
    for name, layer in list(module.named_modules()):
        if type(layer) not in classes or any(part in name for part in modules_to_not_convert or ()):
            continue
        if patterns is not None and not _is_included(name, patterns):
            continue
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, classes[type(layer)].from_float(layer, config))
    return module


def _is_included(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the name, or that of a module around it."""
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
    model = float_model if inplace else _copy(float_model)
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
