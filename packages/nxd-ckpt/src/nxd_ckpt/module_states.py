"""The saved state of a module: the tensors of its `state_dict`, and how they are loaded.

A tensor in the module's own memory is filled in place. Anything else in the `state_dict` (created by hooks, by an
overridden `state_dict`, or an extra state) is a copy, and is loaded with `load_state_dict`.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nxd_ckpt.distributed_tensors import is_dtensor, local_tensor
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.shard_marks import check_layers, is_part

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in names that torch makes
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class ModuleState:
    """The state of a module, split into its parts.

    Attributes:
        module: the module, without a DDP wrapper.
        content: its state dict, with the module's own parameters and buffers in place of tensors that share their
            memory.
        own: names of the tensors in the module's own memory.
        buffers: names of those that are buffers.
    """

    module: nn.Module
    content: dict[str, Any]
    own: set[str]
    buffers: set[str]

    @property
    def is_filled_in_place(self) -> bool:
        """Whether filling the tensors in place is enough to load the module."""
        return self.own >= self.content.keys() and not _loads_itself(self.module)


def plain_name(name: str) -> str:
    """Remove the parts of a name that torch.compile, FSDP and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict was returned by `get_extra_state`."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's parameters once each, under their first names; for a pipeline, those of this rank."""
    module = _unwrapped(module)
    if not hasattr(module, "local_named_parameters"):
        return ((plain_name(name), parameter) for name, parameter in module.named_parameters())
    first_names: Mapping[str, str] = module.tied_names()  # type: ignore[operator]
    named = module.local_named_parameters()  # type: ignore[operator]
    return ((plain_name(first_names.get(name, name)), parameter) for name, parameter in named)


def module_state(module: nn.Module, *, several_ranks: bool) -> ModuleState:
    """Return the state of a module to save or fill.

    A pipeline has `local_state_dict`, `local_named_parameters`, `local_named_buffers`, `local_named_modules` and
    `tied_names`, which return this rank's part under the names of the whole model.

    Raises:
        ValueError: parameters are parts without a spec, or hooks have combined them.
    """
    module = _unwrapped(module)
    is_pipeline = hasattr(module, "local_state_dict")
    named_modules: Callable[[], Any] = module.local_named_modules if is_pipeline else module.named_modules  # type: ignore[assignment]
    if several_ranks:
        check_layers(named_modules)
    with torch.no_grad():
        content: dict[str, Any] = module.local_state_dict() if is_pipeline else module.state_dict()  # type: ignore[operator]
    if is_pipeline:
        parameters: dict[str, Any] = dict(module.local_named_parameters())  # type: ignore[operator]
        buffers: dict[str, Any] = dict(module.local_named_buffers())  # type: ignore[operator]
    else:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
    there = {**buffers, **parameters}
    by_place = {_place(tensor): tensor for tensor in there.values()}
    own: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, torch.Tensor) and not is_extra_state(name) and (place := _place(value)) is not None:
            named = there.get(name)
            found = named if named is not None and _place(named) == place else by_place.get(place)
            if found is not None:
                own[name] = found
    if several_ranks:
        _check_made(content, own, parameters)
    buffer_ids = set(map(id, buffers.values()))
    content.update(own)
    return ModuleState(module, content, set(own), {name for name, tensor in own.items() if id(tensor) in buffer_ids})


def is_state_dict(content: Any) -> bool:
    """Whether a value was returned by a module's `state_dict`."""
    return hasattr(content, "_metadata") and isinstance(content, Mapping)


def parts_by_place() -> dict[Any, nn.Parameter]:
    """Return the parameters of this process that are parts, by their memory.

    They are searched among all Python objects, which takes a tenth of a second: there is no other way from the bare
    tensors of a `state_dict` to the parameters with their specs.
    """
    living = (it for it in gc.get_objects() if issubclass(type(it), nn.Parameter))
    return {_place(parameter): parameter for parameter in living if is_part(parameter) and parameter.numel()}


def with_parts(content: Mapping[str, Any], parts: Mapping[Any, nn.Parameter]) -> dict[str, Any]:
    """Return a module's `state_dict` with parameters in place of its bare tensors, which have no specs."""
    return {
        name: parts.get(_place(value), value) if isinstance(value, torch.Tensor) and value.numel() else value
        for name, value in content.items()
    }


def load_into_module(path: str, state: ModuleState, before: Mapping[str, torch.Tensor]) -> None:
    """Pass a filled state to its module with `load_state_dict`.

    Args:
        path: the module's path, for messages.
        state: the result of `module_state`, with `content` filled.
        before: copies of the tensors in `content` outside the module's memory, taken before they were filled.

    Raises:
        CheckpointError: the module does not accept an entry of its own `state_dict`.
    """
    with torch.no_grad():
        result = state.module.load_state_dict(state.content, strict=False)
    refused = [name for name in getattr(result, "unexpected_keys", None) or () if name not in state.own]
    after = state.module.state_dict() if before else {}
    refused += [
        name
        for name, value in before.items()
        if isinstance(after.get(name), torch.Tensor)
        and after[name].shape == value.shape
        and torch.equal(after[name], value)
        and not torch.equal(value, state.content[name])
    ]
    if refused:
        raise CheckpointError(
            f"{path}.{plain_name(refused[0])} is in the state_dict of a {type(state.module).__name__}, but its "
            "load_state_dict does not accept it, so it was not loaded; give the module a load_state_dict (or hook) "
            "that does, or leave the name out of its state_dict"
        )


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _loads_itself(module: nn.Module) -> bool:
    """Whether loading does more than copying, because of hooks or overridden methods."""
    if type(module).load_state_dict is not nn.Module.load_state_dict and not hasattr(module, "local_state_dict"):
        return True
    for part in module.modules():
        if part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks:
            return True
        load = type(part)._load_from_state_dict
        if load is not nn.Module._load_from_state_dict and not load.__module__.startswith("torch.nn."):
            return True
    return False


def _place(tensor: Any) -> Any:
    """Return a key that is equal for tensors with the same memory; None if the memory is unknown."""
    if is_dtensor(tensor):
        inner = _place(local_tensor(tensor))
        return None if inner is None else ("DTensor", tuple(tensor.shape), inner)
    if hasattr(type(tensor), "__tensor_flatten__"):
        places = tuple(_place(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        return None if None in places else places
    try:
        return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    except (RuntimeError, ValueError, NotImplementedError):  # no memory of its own
        return None


def _check_made(content: Mapping[str, Any], own: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Refuse tensors that hooks have created from parts, since their spec is unknown."""
    made = [name for name, value in content.items() if isinstance(value, torch.Tensor) and name not in own]
    made = [name for name in made if not is_extra_state(name) and not is_dtensor(content[name])]
    saved = set(map(id, own.values()))
    parts = [name for name, parameter in parameters.items() if id(parameter) not in saved and is_part(parameter)]
    if made and parts:
        raise ValueError(
            f"{made[0]!r} is created by the module's state_dict, which leaves out {parts[0]!r}, a shard of a tensor, "
            "so it is unknown which part it holds; save the parameters themselves"
        )
