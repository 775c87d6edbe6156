"""Converts a trainer's state (modules, optimizers and numbers, nested in dicts and lists) to named tensors and values.

A tensor's name is its path, joined by dots: `{"model": {"weight": ...}}` has "model.weight", and so does a module with
that parameter under "model". A part without tensors, such as a number or a scheduler's state, is one value at its path.
Values are stored as JSON in a file of the checkpoint. `state_walk.py` converts, and this file has the result.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nxd_ckpt.distributed_tensors import is_dtensor, is_sharded_tensor_of_torch
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.optimizer_states import by_owner
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import ShardedTensor

VALUES_FILE = "values.json"  # among the extra files
PER_RANK = "state"  # key of rank_objects
_LARGEST_PER_RANK = 2**20  # bytes


@dataclass
class PerRank:
    """A value that differs between ranks, such as the state of a random generator or the position in the data.

    Attributes:
        value: numbers, strings, lists and dicts of them, small tensors; or an object with `state_dict` and
            `load_state_dict`. `load` sets it to the value saved by the rank with the same number, and changes nothing
            if there was no such rank.
    """

    value: Any


@dataclass
class TrainingState:
    """A nested state, split into tensors and values.

    Attributes:
        tensors: the tensors by name; they share the memory of the state.
        may_differ: names of tensors that may differ between replicas, such as buffers.
        of_first_holder: names of tensors to save from a single rank: those that may differ, and small bare tensors,
            some of which may be buffers.
        values: the values by path; the first rank that has a value provides it.
        groups: the paths of values that are optimizer groups, whose parameters may be on several ranks.
        rank_values: this rank's `PerRank` values by path.
        setters: functions that store a loaded value in the state, by path.
        finish: functions to call, in order, after tensors are filled and values are set.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    may_differ: set[str] = field(default_factory=set)
    of_first_holder: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    rank_values: dict[str, Any] = field(default_factory=dict)
    setters: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    finish: list[Callable[[], None]] = field(default_factory=list)


@dataclass  # not frozen, because of its cached properties
class Stored:
    """The contents of a checkpoint to load.

    Attributes:
        tensors: dtype and shape of each tensor.
        values: function that reads the values, by path.
    """

    tensors: Mapping[str, TensorInfo]
    values: Callable[[], Mapping[str, Any]]

    @cached_property
    def tensors_by_owner(self) -> dict[str, dict[str, TensorInfo]]:
        """The tensors below each path."""
        return by_owner(self.tensors)

    @cached_property
    def values_by_owner(self) -> dict[str, dict[str, Any]]:
        """The values below each path."""
        return by_owner(self.values())

    def keys_of(self, paths: Iterable[str]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of the states below the paths of a parameter's logical tensors, by key."""
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for path in paths:
            found |= {key: (info.dtype, info.global_shape) for key, info in self.tensors_by_owner.get(path, {}).items()}
            for key, value in self.values_by_owner.get(path, {}).items():
                found[key] = (torch.int64 if isinstance(value, int) else torch.float64, ())
        return found

    def holds(self, path: str) -> bool:
        """Whether there is a value at that path."""
        return path in self.values()

    def holds_below(self, path: str) -> bool:
        """Whether there is anything below that path."""
        return any(name.startswith(f"{path}.") for name in (*self.tensors, *self.values()))


def values_file(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the extra file that holds the values; an empty dict if there are none."""
    return {VALUES_FILE: json.dumps(values).encode()} if values else {}


def read_values(content: bytes) -> dict[str, Any]:
    """Return the values in such a file.

    Raises:
        CheckpointError: it does not hold values.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{VALUES_FILE} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{VALUES_FILE} holds a {type(values).__name__}; expected an object of paths")
    return values


def encode_rank_value(path: str, value: Any) -> Any:
    """Return the value with small tensors encoded as text."""
    if isinstance(value, torch.Tensor):
        if is_dtensor(value) or value.nbytes > _LARGEST_PER_RANK:
            raise ValueError(
                f"{path!r} is a tensor of {value.nbytes} bytes; PerRank takes plain tensors of at most 1 MiB"
            )
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        text = base64.b64encode(raw).decode()
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "base64": text}
    if isinstance(value, Mapping):
        return {key: encode_rank_value(joined(path, key), it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [encode_rank_value(joined(path, index), it) for index, it in enumerate(value)]
    return value


def decode_rank_value(value: Any) -> Any:
    """Reverse `encode_rank_value`."""
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "base64": str(text)} if len(value) == 3:
            raw = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            return raw.view(getattr(torch, dtype)).reshape(shape)
        case dict():
            return {key: decode_rank_value(it) for key, it in value.items()}
        case list():
            return [decode_rank_value(it) for it in value]
    return value


def joined(path: str, key: Any) -> str:
    """Return the path of a part at a key of another."""
    return f"{path}.{key}" if path and key != "" else path or str(key)


def items_of(path: str, parts: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and parts of a container.

    Raises:
        ValueError: a key is neither a string nor an integer.
    """
    if not isinstance(parts, Mapping):
        yield from enumerate(parts)
        return
    for key, part in parts.items():
        if not isinstance(key, str | int):
            raise ValueError(f"{path or 'the state'} has the key {key!r}; use strings or integers as keys")
        yield key, part


def holds_objects(part: Any) -> bool:
    """Whether a part contains anything besides keys, numbers and strings."""
    return holds(part, lambda it: not (it is None or isinstance(it, bool | int | float | str)))


def holds(part: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether `wanted` is true for anything in nested dicts, lists and tuples."""
    if not isinstance(part, Mapping | list | tuple):
        return wanted(part)
    return any(holds(it, wanted) for it in (part.values() if isinstance(part, Mapping) else part))


def is_tensor(part: Any) -> bool:
    """Whether a part is a tensor or one of the classes of sharded tensors."""
    return isinstance(part, torch.Tensor | ShardedTensor) or is_sharded_tensor_of_torch(part)


def holds_more_than_tensors(part: Any) -> bool:
    """Whether a part contains modules, optimizers or other objects with a state."""
    return holds(part, lambda it: not is_tensor(it) and (isinstance(it, PerRank) or hasattr(it, "state_dict")))


def modules_in(state: Any, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a state with their paths."""
    if isinstance(state, nn.Module):
        yield path, state
    elif isinstance(state, Mapping | list | tuple):
        for key, part in items_of(path, state):
            yield from modules_in(part, joined(path, key))
