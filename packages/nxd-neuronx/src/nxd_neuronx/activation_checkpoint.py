"""Activation checkpointing in the form that scripts use: with a predicate, or with their own wrapper.

Without a wrapper of your own the work is `nxd_layers.apply_activation_checkpointing`, which wraps nothing: parameters
keep their names.
"""

from collections.abc import Callable, Iterator
from typing import Any

import nxd_layers
from nxd_engine.nxd_model import NxDModel
from nxd_layers.activation_checkpoint import named_transformer_layers
from nxd_pipeline import NxDPPModel
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper

_PREFIX = "_checkpoint_wrapped_module"  # of the module inside torch's wrapper


class NxDCheckpointWrapper(CheckpointWrapper):
    """torch's wrapper, in which modules have the names that they have without it."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Modules by name, without torch's prefix."""
        for name, module in super().named_modules(*args, **kwargs):
            yield ".".join(part for part in name.split(".") if part != _PREFIX), module


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> NxDCheckpointWrapper:
    """Wrap a module so that it is recomputed in backward.

    Args:
        module: module to wrap.
        checkpoint_impl: accepted without effect; torch's own.
        checkpoint_fn: replacement for torch's `checkpoint`.
        **checkpoint_fn_kwargs: its keyword arguments.
    """
    return NxDCheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[[nn.Module], nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] | None = None,
) -> None:
    """Recompute parts of a model in backward.

    Args:
        model: the model, changed in place; for an `NxDModel` or `NxDPPModel`, this rank's parts.
        checkpoint_wrapper_fn: function that wraps a part; the wrapper replaces it. By default parts are not moved, and
            only their forward is replaced.
        check_fn: function that returns whether a module is such a part; the transformer layers if None.

    Raises:
        ValueError: the model has no such part.
    """
    if checkpoint_wrapper_fn is checkpoint_wrapper:
        nxd_layers.apply_activation_checkpointing(model, "full" if check_fn is None else check_fn)
        return
    chosen = check_fn or _is_transformer_layer(model)
    whole = [model.local_module()] if isinstance(model, NxDModel) else [model]
    stages = (
        [part for name, part in model.local_named_modules() if not name] if isinstance(model, NxDPPModel) else whole
    )
    if not sum(_wrap_children(stage, checkpoint_wrapper_fn, chosen) for stage in stages):
        raise ValueError(
            f"check_fn accepts no module of {type(model).__name__}; it is called with each module, and must return "
            "True for those to wrap"
        )


def _is_transformer_layer(model: nn.Module) -> Callable[[nn.Module], bool]:
    layers = set(named_transformer_layers(model).values())
    return layers.__contains__


def _wrap_children(
    module: nn.Module, wrap: Callable[[nn.Module], nn.Module], check_fn: Callable[[nn.Module], bool]
) -> int:
    """Replace the submodules that `check_fn` accepts by wrappers; returns their number."""
    count = 0
    for name, child in list(module.named_children()):
        count += _wrap_children(child, wrap, check_fn)
        if check_fn(child):
            setattr(module, name, wrap(child))
            count += 1
    return count
