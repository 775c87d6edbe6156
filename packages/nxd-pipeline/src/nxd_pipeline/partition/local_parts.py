"""One rank's part of a model: its tensors under the names of the whole model, and their memory and values.

`LocalParts` names parameters, buffers and modules. `without_other_stages` returns the model that the stages were cut
from, without the memory of other stages. `materialize` fills modules that were made on the "meta" device.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from nxd_state import allocate_meta_tensor, get_shard_spec, seed_of_module
from torch import Tensor, nn

from nxd_pipeline.partition.stage import Stage
from nxd_pipeline.partition.stand_ins import AbsentLayer, AbsentModule, shallow_copy

ParamInit = Callable[..., Any]


class LocalParts:
    """A rank's stages, or a whole model."""

    def __init__(self, parts: Sequence[nn.Module | Stage]) -> None:
        self._parts = parts

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules by name, without stand-ins for other stages' modules; each stage itself has the name ""."""
        for part in self._parts:
            absent = "\n"  # the start of no name
            for name, module in part.named_modules():
                if isinstance(module, AbsentLayer | AbsentModule):
                    absent = f"{name}."
                elif not name.startswith(absent):
                    yield name, module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by name; a tied weight once."""
        seen: set[nn.Parameter] = set()
        for part in self._parts:
            for name, parameter in part.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers by name, including those that are not saved; each once."""
        seen: set[str] = set()
        for name, module in self.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                path = f"{name}.{key}" if name else key
                if path not in seen:
                    seen.add(path)
                    yield path, buffer

    def tensors(self) -> list[Tensor]:
        """Return parameters and buffers."""
        return [tensor for _, tensor in (*self.named_parameters(), *self.named_buffers())]

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by name; a tied weight under each of its names."""
        return {name: value for part in self._parts for name, value in part.state_dict(keep_vars=keep_vars).items()}

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool) -> None:
        """Copy values from a state of these parts, or of the whole model.

        Raises:
            ValueError: names are missing (if `strict`), or shapes differ.
        """
        own = self.state_dict()
        missing = sorted(own.keys() - state.keys())
        if strict and missing:
            raise ValueError(
                f"the state has no {missing}; pass the state of the whole model, or strict=False to keep these"
            )
        for name in own.keys() & state.keys():
            if own[name].shape != state[name].shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(own[name].shape)} here but {tuple(state[name].shape)} in the state; "
                    "load a state of the same model and tensor-parallel degree"
                )
        with torch.no_grad():
            for name in own.keys() & state.keys():
                own[name].copy_(state[name])

    def tied_names(self) -> dict[str, str]:
        """Map each further name of a tied weight to the first."""
        first: dict[nn.Parameter, str] = {}
        tied: dict[str, str] = {}
        for part in self._parts:
            for name, parameter in part.named_parameters(remove_duplicate=False):
                if first.setdefault(parameter, name) != name:
                    tied[name] = first[parameter]
        return tied


def without_other_stages(model: nn.Module, own: Iterable[Tensor]) -> nn.Module:
    """Return the whole model for its methods and attributes, with other ranks' tensors on the meta device.

    A method that changes weights changes only those of this rank. Modules whose tensors all belong to this rank are
    the model's own; the model itself is not changed.

    Args:
        model: the model before it was cut.
        own: parameters and buffers of this rank's stages.

    Returns:
        The model, or a copy of it if tensors of other ranks were replaced.
    """
    return _view(model, {id(tensor) for tensor in own}, {})


def _view(module: nn.Module, kept: set[int], made: dict[int, Tensor]) -> nn.Module:  # `made` keeps tied tensors tied
    if all(id(tensor) in kept for tensor in itertools.chain(module.parameters(), module.buffers())):
        return module
    copy = shallow_copy(module)
    _forget_calls(copy)
    for registry in (copy._parameters, copy._buffers):
        for name, tensor in registry.items():
            if tensor is not None and id(tensor) not in kept:
                registry[name] = made.setdefault(id(tensor), _on_meta(tensor))  # type: ignore[assignment]
    for name, child in module.named_children():
        copy._modules[name] = _view(child, kept, made)
    return copy


def _forget_calls(copy: nn.Module) -> None:
    """Drop hooks and an instance's own forward: nothing calls the copy, and they may hold modules of other stages."""
    copy.__dict__.pop("forward", None)
    for name, registry in vars(copy).items():
        if name.endswith("_hooks"):
            registry.clear()


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    meta = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
    meta.__dict__.update(tensor.__dict__)  # marks that scripts have set
    return meta


def materialize(
    model: nn.Module,
    param_init_fn: ParamInit | None,
    *,
    only: Iterable[Tensor] | None = None,
    on_filled: Callable[[nn.Module], None] | None = None,
) -> None:
    """Allocate meta parameters and buffers on the CPU and let `param_init_fn` fill them, module by module.

    Random values depend only on torch's seed and the module's name, not on the cuts. Padding (see `ShardSpec`) becomes
    zero. Parameters remain the same objects, with their attributes: tied ones stay tied, with the values from the last
    module that has them, on every rank.

    Args:
        model: the whole model.
        param_init_fn: function of a module, or of a module and a device, that fills the module's own parameters and
            buffers, not those of submodules.
        only: the parameters and buffers to fill; all if None.
        on_filled: called with each module once its own parameters are filled.

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
            if on_filled is not None:
                on_filled(module)


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
    """Zero the padding, which `param_init_fn` has filled too."""
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
    """Whether the function requires a second argument, as in scripts for NeuronX Distributed."""
    parameters = inspect.signature(param_init_fn).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(it.kind in positional and it.default is it.empty for it in parameters) > 1
