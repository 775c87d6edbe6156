"""One rank's part of a model under the names of the whole: parameters, buffers, modules and their state.

`without_other_stages` gives the whole model that the stages were cut from, without the memory of the other stages.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from nxd_pipeline.partition.stage import Stage
from nxd_pipeline.partition.stand_ins import AbsentLayer, AbsentModule, shallow_copy


class LocalParts:
    """The stages of a rank, or a whole model."""

    def __init__(self, parts: Sequence[nn.Module | Stage]) -> None:
        self._parts = parts

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules by name, without stand-ins for those of other stages; each stage has the name of the whole, ""."""
        for part in self._parts:
            absent = "\n"  # the start of no name
            for name, module in part.named_modules():
                if isinstance(module, AbsentLayer | AbsentModule):
                    absent = f"{name}."
                elif not name.startswith(absent):
                    yield name, module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by name; a tied weight once."""
        seen: set[nn.Parameter] = set()
        for part in self._parts:
            for name, parameter in part.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers by name, also those that are not saved; each once."""
        seen: set[str] = set()
        for name, module in self.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                path = f"{name}.{key}" if name else key
                if path not in seen:
                    seen.add(path)
                    yield path, buffer

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [tensor for _, tensor in (*self.named_parameters(), *self.named_buffers())]

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by name; a tied weight under each of its names."""
        return {name: tensor for part in self._parts for name, tensor in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool) -> None:
        """Copy values from a state of this part, or of the whole model.

        Raises:
            ValueError: names of this part are missing (if `strict`), or shapes differ.
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
        """Of each further name of a tied weight, the first."""
        first: dict[nn.Parameter, str] = {}
        tied: dict[str, str] = {}
        for part in self._parts:
            for name, parameter in part.named_parameters(remove_duplicate=False):
                if first.setdefault(parameter, name) != name:
                    tied[name] = first[parameter]
        return tied


def without_other_stages(model: nn.Module, own: Iterable[Tensor]) -> nn.Module:
    """The whole model for its methods and attributes; parameters and buffers of other ranks are on the meta device.

    A method that changes weights changes only those of this rank. Modules whose tensors are all
    of this rank are the model's own; the model itself is not changed.

    Args:
        model: the model before it was cut.
        own: parameters and buffers of this rank's stages.

    Returns:
        The model, or a copy of it where tensors of other ranks were replaced.
    """
    kept = {id(tensor) for tensor in own}
    made: dict[int, Tensor] = {}  # tied tensors stay tied
    return _view(model, kept, made)


def _view(module: nn.Module, kept: set[int], made: dict[int, Tensor]) -> nn.Module:
    if all(id(tensor) in kept for tensor in _tensors(module)):
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
    """Drop hooks and a forward of its own: nothing calls the copy, and they may hold the modules of other stages."""
    copy.__dict__.pop("forward", None)
    for name, registry in vars(copy).items():
        if name.endswith("_hooks"):
            registry.clear()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    meta = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
    meta.__dict__.update(tensor.__dict__)  # what scripts mark parameters with
    return meta
