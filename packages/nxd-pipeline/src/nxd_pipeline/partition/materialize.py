"""Giving memory and values to modules made on the "meta" device, for this rank's stages only."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from nxd_state import allocate_meta_tensor, get_shard_spec, seed_of_module
from torch import Tensor, nn

ParamInit = Callable[..., Any]


def materialize(model: nn.Module, param_init_fn: ParamInit | None, *, only: Iterable[Tensor] | None = None) -> None:
    """Put meta parameters and buffers on the CPU and have `param_init_fn` fill them, module by module.

    Random values depend on torch's seed and the module's name only, so that they do not depend on how the model is
    cut. Padding in shard metadata becomes zero. Parameters stay the objects they were, with their
    attributes: tied ones stay tied, and have the values that the last module with them gave, on every rank.

    Args:
        model: the whole model.
        param_init_fn: called with a module, or with a module and a device if it takes two; it fills the parameters and
            buffers of that module, not those of modules below.
        only: the parameters and buffers to fill; all if None.

    Raises:
        ValueError: something is on the meta device and `param_init_fn` is None, or it has left values unset.
    """
    wanted = {id(it) for it in (itertools.chain(model.parameters(), model.buffers()) if only is None else only)}
    named = [
        (name, module)
        for name, module in model.named_modules()
        if any(it.is_meta and id(it) in wanted for _, it in _own_tensors(module))
    ]
    if not named:
        return
    if param_init_fn is None:
        name, module = named[0]
        raise ValueError(
            f"parameters or buffers of {name!r} ({type(module).__name__}) are on the meta device; pass param_init_fn, "
            "a function that takes a module and fills its own parameters and buffers, such as model._init_weights of "
            "a Hugging Face model"
        )
    seed = torch.initial_seed()
    with torch.no_grad():
        for name, module in named:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of_module(seed, name))
                tensors = {key: it for key, it in _own_tensors(module) if id(it) in wanted}
                _fill(name, module, tensors, param_init_fn)


def _fill(name: str, module: nn.Module, tensors: Mapping[str, Tensor], param_init_fn: ParamInit) -> None:
    for tensor in tensors.values():
        if tensor.is_meta:
            allocate_meta_tensor(tensor)
    if _takes_device(param_init_fn):
        param_init_fn(module, torch.device("cpu"))
    else:
        param_init_fn(module)
    for key, tensor in tensors.items():
        _clear_padding(tensor)
        if tensor.is_floating_point() and bool(tensor.sum().isnan()):
            raise ValueError(
                f"param_init_fn left {key!r} of {name!r} ({type(module).__name__}) unset; it must fill every "
                "parameter and buffer of the module it is called with"
            )


def _clear_padding(tensor: Tensor) -> None:
    """Zero what is no part of a logical tensor, whatever has been drawn for it."""
    spec = get_shard_spec(tensor)
    if spec is None or not spec.has_padding:
        return
    kept = [(piece.local.slices, tensor[piece.local.slices].clone()) for piece in spec.pieces]
    tensor.zero_()
    for box, values in kept:
        tensor[box] = values


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _takes_device(param_init_fn: ParamInit) -> bool:
    """Whether a second argument is needed, as scripts for the existing library have it."""
    parameters = inspect.signature(param_init_fn).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(it.kind in positional and it.default is it.empty for it in parameters) > 1
