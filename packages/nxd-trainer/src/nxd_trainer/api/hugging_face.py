"""Unmodified models of transformers in `initialize_parallel_model`: split by their own plan before all else."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from nxd_layers import hf
from nxd_state import get_shard_spec
from torch import nn

from nxd_trainer.api.config import param_init_fn_of

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def split_if_plain(module: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Split a model of transformers over the tensor-parallel ranks, unless its maker has done so; leave others alone.

    Raises:
        ValueError: the model cannot be split; `model_fn` may do it by `nxd_layers.hf.parallelize(model, plan=...)`.
    """
    if config["tensor_parallel_size"] > 1 and not _is_split(module) and hf.is_transformers_model(module):
        hf.parallelize(module, sequence_parallel=config["sequence_parallel"])
    return module


def leave_out_cache(module: nn.Module, config: Mapping[str, Any]) -> None:
    """With activation checkpointing, have a model of transformers keep no cache of keys and values while it trains.

    It does so by default, and a layer that is computed again would add to it once more. `generate()` has one still.
    """
    if config["activation_checkpoint_config"] is not None and hf.is_transformers_model(module):
        text_config: Any = module.config.get_text_config()  # type: ignore[operator, union-attr]
        text_config.use_cache = False


def param_init_fn_for(module: nn.Module, config: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The config's `param_init_fn`; made for plain layers, it fills parallel ones of a split model of transformers."""
    fill = param_init_fn_of(config)
    if fill is None or not _is_split(module) or not hf.is_transformers_model(module):
        return fill
    parameters = inspect.signature(fill).parameters.values()
    takes_device = sum(it.kind in _POSITIONAL and it.default is it.empty for it in parameters) > 1
    fill_plain = (lambda plain: fill(plain, torch.device("cpu"))) if takes_device else fill
    return hf.param_init_fn_of(module, fill_plain)


def _is_split(module: nn.Module) -> bool:
    return any(get_shard_spec(parameter) for parameter in module.parameters())
