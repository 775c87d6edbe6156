"""What a trainer has, nested in dicts and lists, as named tensors and values: modules, optimizers, numbers.

A tensor's name is its path, joined by dots: `{"model": {"weight": ...}}` has "model.weight", and so has a module with
that parameter under "model". A part without any tensor, such as a number or the state of a scheduler, is one value at
its path. Values are JSON in a file of the checkpoint.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nxd_ckpt.distributed_tensors import (
    as_boxes,
    is_dtensor,
    is_sharded_tensor_of_torch,
)
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.objects import check_json
from nxd_ckpt.optimizer_states import (
    as_parameter_is_cut,
    by_owner,
    destination_of,
    fresh_states,
    options_of,
    set_groups,
)
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import ShardedTensor
from nxd_ckpt.tensor_subclasses import is_subclass, parts_of

VALUES_FILE = "values.json"  # among the extra files
PER_RANK = "state"  # key of rank_objects
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in names that torch makes
_LARGEST_PER_RANK = 2**20  # bytes


@dataclass
class PerRank:
    """A value that is another one on each rank, such as the state of a random generator or the position in the data.

    Attributes:
        value: numbers, strings, lists and dicts of them, small tensors; or an object with `state_dict` and
            `load_state_dict`. `load` puts here what the rank of the same number saved, and changes nothing if there
            was none.
    """

    value: Any


@dataclass
class TrainingState:
    """A nested state, taken apart.

    Attributes:
        tensors: by name; on the memory of the state.
        values: by path; of rank 0.
        rank_values: by path; of this rank.
        setters: by path, puts a loaded value where it belongs.
        finish: to be called when tensors and values are loaded.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rank_values: dict[str, Any] = field(default_factory=dict)
    setters: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    finish: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """What a checkpoint has that is to be loaded.

    Attributes:
        tensors: type and shape of each.
        values: reads its values, by path.
    """

    tensors: Mapping[str, TensorInfo]
    values: Callable[[], Mapping[str, Any]]


def take_apart(state: Any, stored: Stored | None = None) -> TrainingState:
    """The tensors and values of a nested state.

    Args:
        state: what was given to `save` or to `load`.
        stored: what is to be loaded: where an optimizer lacks a state, one is made for it. None to save.

    Raises:
        ValueError: a part cannot be saved, or two have one name; names it.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"a {type(state).__name__} is no state; pass {{name: tensor, module, optimizer or number}}")
    found = TrainingState()
    _Walk(found, state, stored).container("", state)
    return found


def values_file(values: Mapping[str, Any]) -> dict[str, bytes]:
    """The extra file that holds the values; none without any."""
    return {VALUES_FILE: json.dumps(values).encode()} if values else {}


def read_values(content: bytes) -> dict[str, Any]:
    """The values in such a file.

    Raises:
        CheckpointError: it holds something else.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{VALUES_FILE} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{VALUES_FILE} holds a {type(values).__name__}; expected an object of paths")
    return values


class _Walk:
    """Through a state, adding to `found` what is there."""

    def __init__(self, found: TrainingState, state: Mapping[Any, Any], stored: Stored | None) -> None:
        self._found = found
        self._state = state
        self._stored = stored

    @cached_property
    def _names(self) -> dict[int, str]:
        """Of parameters; looked up where there is an optimizer."""
        return _parameter_names(self._state)

    def container(self, path: str, parts: Any) -> None:
        for key, part in _items(path, parts):
            if isinstance(parts, tuple) and self._stored is not None and not _holds_objects(part):
                raise ValueError(f"{_joined(path, key)!r} is {part!r} in a tuple, which cannot be replaced; use a list")
            self.part(_joined(path, key), part, partial(_set, parts, key))

    def part(self, path: str, part: Any, set_part: Callable[[Any], None]) -> None:
        if isinstance(part, torch.Tensor | ShardedTensor) or is_sharded_tensor_of_torch(part):
            self._tensor(path, part)
        elif isinstance(part, PerRank):
            self._per_rank(path, part)
        elif isinstance(part, nn.Module):
            self._module(path, part)
        elif isinstance(part, Optimizer):
            self._optimizer(path, part)
        elif isinstance(part, Mapping | list | tuple) and _holds_objects(part):
            self.container(path, part)
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            own = {"": part.state_dict()}
            self.part(path, own[""], partial(_set, own, ""))
            self._found.finish.append(lambda: part.load_state_dict(own[""]))
        else:
            check_json(part, path)
            self._value(path, part, set_part)

    def _tensor(self, path: str, tensor: Any) -> None:
        if path in self._found.tensors:
            raise ValueError(f"two tensors of the state are named {path!r}; rename a key")
        try:
            if is_subclass(tensor):
                parts = parts_of(tensor)
            else:
                self._found.tensors[path] = as_boxes(tensor)
                return
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
        for name, part in parts.items():
            self._tensor(_joined(path, name), part)

    def _value(self, path: str, value: Any, set_value: Callable[[Any], None]) -> None:
        self._found.values[path] = value
        self._found.setters[path] = set_value

    def _per_rank(self, path: str, part: PerRank) -> None:
        stateful = hasattr(part.value, "state_dict")
        value = _encoded(path, part.value.state_dict() if stateful else part.value)
        check_json(value, path)
        self._found.rank_values[path] = value

        def set_value(loaded: Any) -> None:
            if stateful:
                part.value.load_state_dict(_decoded(loaded))
            else:
                part.value = _decoded(loaded)

        self._found.setters[path] = set_value

    def _module(self, path: str, module: nn.Module) -> None:
        for name, part in _unwrapped(module).state_dict().items():
            if isinstance(part, torch.Tensor):
                self._tensor(_joined(path, _plain_name(name)), part)
                continue
            owner = _unwrapped(module).get_submodule(name.rpartition(".")[0])
            full_name = _joined(path, _plain_name(name))
            check_json(part, full_name)
            self._value(full_name, part, owner.set_extra_state)

    def _optimizer(self, path: str, optimizer: Optimizer) -> None:
        parameters = self._named(path, optimizer)
        stored = self._stored or Stored({}, dict)
        tensors_of, values_of = by_owner(stored.tensors), by_owner(stored.values())
        prefixes = {name: _joined(path, f"state.{name}") for name in parameters}
        states = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in parameters.values()}
        in_parts = {owner.rpartition(".")[0] for owner in tensors_of}  # owners of states that are several tensors
        if any(prefixes[name] in in_parts and not states[parameter] for name, parameter in parameters.items()):
            states |= fresh_states(path, optimizer)
        for name, parameter in parameters.items():
            prefix, state = prefixes[name], states[parameter]
            for key, info in tensors_of.get(prefix, {}).items():
                state[key] = destination_of(state.get(key), info, parameter, optimizer)
            for key in values_of.get(prefix, {}):
                state.setdefault(key, None)
            for key, part in state.items():
                part_path = _joined(prefix, key)
                self.part(part_path, as_parameter_is_cut(part_path, part, parameter), partial(_set, state, key))
        groups = [
            {**options_of(group), "params": [self._names[id(it)] for it in group["params"]]}
            for group in optimizer.param_groups
        ]
        check_json(groups, _joined(path, "param_groups"))
        self._value(_joined(path, "param_groups"), groups, lambda it: set_groups(optimizer, groups, it))
        if self._stored is not None:
            self._found.finish.append(lambda: optimizer.state.update({p: it for p, it in states.items() if it}))

    def _named(self, path: str, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if unknown := [it for it in parameters if id(it) not in self._names]:
            raise ValueError(
                f"{path!r} has a parameter {list(unknown[0].shape)} that belongs to no module of the state; put its "
                "model into the state, too"
            )
        return {self._names[id(it)]: it for it in parameters}


def _items(path: str, parts: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(parts, Mapping):
        yield from enumerate(parts)
        return
    for key, part in parts.items():
        if not isinstance(key, str | int):
            raise ValueError(f"{path or 'the state'} has the key {key!r}; keys are strings or whole numbers")
        yield key, part


def _set(parts: Any, key: Any, value: Any) -> None:
    parts[key] = value


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _holds_objects(part: Any) -> bool:
    """Whether there is anything in it that JSON does not know."""
    if isinstance(part, Mapping):
        return any(not isinstance(key, str) or _holds_objects(it) for key, it in part.items())
    if isinstance(part, list | tuple):
        return any(map(_holds_objects, part))
    return not (part is None or isinstance(part, bool | int | float | str))


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _plain_name(name: str) -> str:
    """Without what torch.compile, FSDP and activation checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _parameter_names(state: Any, path: str = "") -> dict[int, str]:
    """The path of each parameter of the modules in a state, by the parameter's id."""
    names: dict[int, str] = {}
    if isinstance(state, nn.Module):
        for name, parameter in _unwrapped(state).named_parameters():
            names[id(parameter)] = _joined(path, _plain_name(name))
    elif isinstance(state, Mapping | list | tuple):
        for key, part in _items(path, state):
            names.update(_parameter_names(part, _joined(path, key)))
    return names


def _encoded(path: str, value: Any) -> Any:
    """With small tensors as text."""
    if isinstance(value, torch.Tensor):
        if is_dtensor(value) or value.nbytes > _LARGEST_PER_RANK:
            raise ValueError(f"{path!r} is a tensor of {value.nbytes} bytes; PerRank takes plain ones of at most 1 MiB")
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "base64": _text(raw)}
    if isinstance(value, Mapping):
        return {key: _encoded(_joined(path, key), it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(_joined(path, index), it) for index, it in enumerate(value)]
    return value


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _decoded(value: Any) -> Any:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "base64": str(text)} if len(value) == 3:
            raw = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            return raw.view(getattr(torch, dtype)).reshape(shape)
        case dict():
            return {key: _decoded(it) for key, it in value.items()}
        case list():
            return [_decoded(it) for it in value]
    return value
