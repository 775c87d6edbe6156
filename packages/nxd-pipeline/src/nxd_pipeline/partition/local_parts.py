"""One rank's part of a model under the names of the whole: parameters, buffers, modules and their state."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from nxd_pipeline.partition.stage import Stage
from nxd_pipeline.partition.stand_ins import AbsentLayer, AbsentModule


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
            raise ValueError(f"the state has no {missing}; give that of the whole model, or strict=False to keep them")
        for name in own.keys() & state.keys():
            if own[name].shape != state[name].shape:
                raise ValueError(
                    f"{name!r} is of shape {tuple(own[name].shape)} here and {tuple(state[name].shape)} in the state; "
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
