"""Unmodified models of transformers in `initialize_parallel_model`: split by their own plan before all else."""

from collections.abc import Callable, Mapping
from typing import Any

from nxd_layers import hf
from nxd_state import get_shard_spec
from torch import nn

from nxd_trainer.api.config_checks import param_init_fn_of


def split_if_plain(module: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Split a model of transformers over the tensor-parallel ranks, unless its maker has done so; leave others alone.

    Raises:
        ValueError: the model cannot be split; `model_fn` may do it by `nxd_layers.hf.parallelize(model, plan=...)`.
    """
    is_plain = not any(get_shard_spec(parameter) for parameter in module.parameters())
    if config["tensor_parallel_size"] > 1 and is_plain and hf.is_transformers_model(module):
        hf.parallelize(module, sequence_parallel=config["sequence_parallel"])
    return module


def param_init_fn_for(module: nn.Module, config: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The config's `param_init_fn`, which is made for plain layers where the module is a model of transformers."""
    fill = param_init_fn_of(config)
    return fill if fill is None or not hf.is_transformers_model(module) else hf.param_init_fn_of(module, fill)
