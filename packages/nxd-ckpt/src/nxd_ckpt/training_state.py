"""Converts a trainer's state (modules, optimizers and numbers, nested in dicts and lists) to named tensors and values.

A tensor's name is its path, joined by dots: `{"model": {"weight": ...}}` has "model.weight", and so does a module with
that parameter under "model". A part without tensors, such as a number or a scheduler's state, is one value at its path.
Values are stored as JSON in a file of the checkpoint.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxd_ckpt.distributed_tensors import as_boxes, is_dtensor, is_sharded_tensor_of_torch
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.module_states import (
    give_back,
    is_extra_state,
    is_state_dict,
    module_state,
    named_parameters,
    parts_by_place,
    plain_name,
    with_parts,
)
from nxd_ckpt.objects import check_json, decode, encode, references
from nxd_ckpt.optimizer_states import (
    as_parameter_is_cut,
    by_owner,
    check_state_dict,
    destination_of,
    fresh_states,
    is_sharded_optimizer,
    is_sharded_state,
    is_state_dict_of_optimizer,
    options_of,
    set_groups,
    state_holder,
    states_of,
    stored_options,
)
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.shard_marks import check_known, check_no_copy, is_cut, logical_names, logical_parts, relative_name
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor
from nxd_ckpt.tensor_subclasses import is_subclass, parts_of

VALUES_FILE = "values.json"  # among the extra files
PER_RANK = "state"  # key of rank_objects
_ONE_TENSOR = {"$tensor": ""}  # a value that is a single tensor
_MASTER = "master_weight"  # the key of a state that is the parameter's value in another dtype
_LARGEST_PER_RANK = 2**20  # bytes
_LARGEST_BUFFER = 2**20  # bytes; a state_dict does not say which of its tensors are parameters


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

    def holds(self, path: str) -> bool:
        """Whether there is a value at that path."""
        return path in self.values()

    def holds_below(self, path: str) -> bool:
        """Whether there is anything below that path."""
        return any(name.startswith(f"{path}.") for name in (*self.tensors, *self.values()))


def take_apart(state: Any, stored: Stored | None = None, *, several_ranks: bool = False) -> TrainingState:
    """Split a nested state into its tensors and values.

    Args:
        state: the state passed to `save` or `load`.
        stored: the checkpoint to load, to create states that an optimizer lacks; None to save.
        several_ranks: whether other ranks may hold other parts; then tensors that may be unmarked parts are refused.

    Raises:
        ValueError: a part cannot be saved, or two have the same name; names it.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is a {type(state).__name__}; pass {{name: tensor, module, optimizer or number}}")
    found = TrainingState()
    _Walk(found, state, stored, several_ranks=several_ranks).container("", state)
    return found


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


class _Walk:
    """Walks through a state and adds its tensors and values to `found`.

    A part's path is `root` followed by `name`; relative names of logical tensors start at `root`.
    """

    def __init__(
        self, found: TrainingState, state: Mapping[Any, Any], stored: Stored | None, *, several_ranks: bool
    ) -> None:
        self._found = found
        self._state = state
        self._stored = stored
        self._several_ranks = several_ranks
        self._of_parts: set[str] = set()  # names of tensors whose boxes may come from several parameters

    @cached_property
    def _names(self) -> dict[int, tuple[str, str]]:
        """The path of a parameter's module and its name there, by the parameter's id; only needed for optimizers."""
        return {id(it): (path, name) for path, module in _modules(self._state) for name, it in named_parameters(module)}

    @cached_property
    def _parts_by_place(self) -> dict[Any, nn.Parameter]:
        """The parameters that are parts, looked up once, if the state has a module's `state_dict`."""
        return parts_by_place()

    def container(self, path: str, parts: Any) -> None:
        content = with_parts(parts, self._parts_by_place) if is_state_dict(parts) else parts
        if self._several_ranks and is_state_dict_of_optimizer(content):
            shapes = {tuple(it.shape) for it in self._parts_by_place.values() if not is_dtensor(it)}
            check_state_dict(path, content, shapes)
        for key, part in _items(path, content):
            if isinstance(parts, tuple) and self._stored is not None and not _holds_objects(part):
                raise ValueError(f"{_joined(path, key)!r} is {part!r} in a tuple, which cannot be replaced; use a list")
            self.part(path, str(key), part, partial(_set, parts, key))

    def part(self, root: str, name: str, part: Any, set_part: Callable[[Any], None]) -> None:
        path = _joined(root, name)
        if _is_tensor(part):
            if self._several_ranks and isinstance(part, torch.Tensor):
                self._check_no_copy(path, name, part)
            self._tensor(root, name, part)
            if type(part) is torch.Tensor and part.numel() * part.itemsize <= _LARGEST_BUFFER:
                self._found.of_first_holder.add(path)
        elif isinstance(part, PerRank):
            self._per_rank(path, part)
        elif isinstance(part, nn.Module):
            self._module(path, part)
        elif is_sharded_optimizer(part):
            self._sharded_optimizer(path, part)
        elif isinstance(part, Optimizer):
            self._optimizer(path, part)
        elif is_sharded_state(part):
            self._sharded_entries(path, part)
        elif isinstance(part, Mapping | list | tuple) and _holds_objects(part):
            self.container(path, part)
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            self._stateful(path, part)
        else:
            self._nested(path, part, set_part)

    @cached_property
    def _parts_by_name(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the module parameters in the state that are parts, by name."""
        named = [it for _, module in _modules(self._state) for it in named_parameters(module)]
        return {name: tuple(parameter.shape) for name, parameter in named if is_cut(parameter)}

    def _check_no_copy(self, path: str, name: str, tensor: torch.Tensor) -> None:
        try:
            check_no_copy(tensor, name, self._parts_by_name)
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None

    def _stateful(self, path: str, part: Any) -> None:
        own = {"": part.state_dict()}
        if _holds_more_than_tensors(own[""]):
            self.container(path, own[""])
        else:
            self._nested(path, own[""], partial(_set, own, ""))
        self._found.finish.append(lambda: part.load_state_dict(own[""]))

    def _tensor(self, root: str, name: str, tensor: Any, *, first_holder: bool = False) -> None:
        path = _joined(root, name)
        try:
            if self._several_ranks and isinstance(tensor, torch.Tensor):
                check_known(tensor)
            parts = parts_of(tensor) if is_subclass(tensor) else None
            cut = logical_parts(tensor, name) if isinstance(tensor, torch.Tensor) and parts is None else None
            boxes = as_boxes(tensor) if parts is None and cut is None else None
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
        if parts is not None:
            for inner, part in parts.items():
                self._tensor(root, _joined(name, inner), part, first_holder=first_holder)
        elif cut is not None:
            for logical, found in cut.items():
                self._boxes(_joined(root, logical), found, first_holder=first_holder)
        else:
            self._add(path, boxes, first_holder=first_holder)

    def _add(self, path: str, tensor: Any, *, first_holder: bool = False) -> None:
        if path in self._found.tensors:
            raise ValueError(f"two tensors of the state are named {path!r}; rename a key")
        self._found.tensors[path] = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
        if first_holder:
            self._found.may_differ.add(path)
            self._found.of_first_holder.add(path)

    def _boxes(self, path: str, boxes: ShardedTensor, *, first_holder: bool = False) -> None:
        """Add boxes of a logical tensor; other parameters may add more boxes to it."""
        present = self._found.tensors.get(path)
        if path not in self._of_parts or not isinstance(present, ShardedTensor):
            self._add(path, boxes, first_holder=first_holder)
        elif present.global_shape != boxes.global_shape:
            raise ValueError(
                f"{path!r} has the shapes {list(present.global_shape)} and {list(boxes.global_shape)} in the specs of "
                "different parameters"
            )
        else:
            self._found.tensors[path] = ShardedTensor(boxes.global_shape, [*present.shards, *boxes.shards])
        self._of_parts.add(path)

    def _value(self, path: str, value: Any, set_value: Callable[[Any], None] | None = None) -> None:
        if path in self._found.values or path in self._found.rank_values:
            raise ValueError(f"two values of the state are named {path!r}; rename a key")
        self._found.values[path] = value
        if set_value is not None:
            self._found.setters[path] = set_value

    def _nested(self, path: str, value: Any, set_value: Callable[[Any], None]) -> None:
        """Add a value that is replaced as a whole; tensors in it are named by their paths."""
        tensors: dict[str, Any] = {}
        skeleton = encode(value, path, _is_tensor, tensors)
        check_json(skeleton, path)
        if self._stored is None:
            if skeleton != _ONE_TENSOR:
                self._value(path, skeleton)
        elif self._stored.holds(path) or path in self._stored.tensors:
            stored = self._stored.values().get(path, _ONE_TENSOR)
            tensors = {name: self._room(_joined(path, name), tensors.get(name)) for name in references(stored)}
            if self._stored.holds(path):
                self._value(path, skeleton)
            self._found.finish.append(lambda: set_value(decode(stored, tensors, value)))
        elif isinstance(value, Mapping | list) and self._stored.holds_below(path):  # written by an earlier version
            self.container(path, value)
        else:
            self._value(path, skeleton)  # which the checkpoint lacks
        for name, tensor in tensors.items():
            self._tensor(path, name, tensor, first_holder=True)

    def _room(self, path: str, present: Any) -> Any:
        """Return a tensor to load a stored one into: the present one if it matches, otherwise a new one."""
        info = self._stored.tensors.get(path) if self._stored is not None else None
        if info is None:
            raise ValueError(f"the checkpoint's values refer to the tensor {path!r}, which it does not have")
        shape = getattr(present, "global_shape", None) if isinstance(present, ShardedTensor) else None
        shape = tuple(present.shape) if isinstance(present, torch.Tensor) else shape
        if present is not None and (shape is None or (shape == info.global_shape and present.dtype == info.dtype)):
            return present
        device = present.device if isinstance(present, torch.Tensor) else torch.device("cpu")
        return torch.empty(info.global_shape, dtype=info.dtype, device=device)

    def _per_rank(self, path: str, part: PerRank) -> None:
        stateful = hasattr(part.value, "state_dict")
        value = _encoded(path, part.value.state_dict() if stateful else part.value)
        check_json(value, path)
        if path in self._found.values or path in self._found.rank_values:
            raise ValueError(f"two values of the state are named {path!r}; rename a key")
        self._found.rank_values[path] = value

        def set_value(loaded: Any) -> None:
            if stateful:
                part.value.load_state_dict(_decoded(loaded))
            else:
                part.value = _decoded(loaded)

        self._found.setters[path] = set_value

    def _module(self, path: str, module: nn.Module) -> None:
        try:
            state = module_state(module, several_ranks=self._several_ranks)
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from None
        before: dict[str, torch.Tensor] = {}
        for name, part in state.content.items():
            if name in state.own:
                self._tensor(path, plain_name(name), part, first_holder=name in state.buffers)
            elif isinstance(part, torch.Tensor) and not is_extra_state(name):
                self._tensor(path, plain_name(name), part, first_holder=True)
                if self._stored is not None and not is_dtensor(part) and not is_subclass(part):
                    before[name] = part.detach().clone()
            else:
                self._nested(_joined(path, plain_name(name)), part, partial(_set, state.content, name))
        if self._stored is not None and not state.is_filled_in_place:
            self._found.finish.append(partial(give_back, path, state, before))

    def _optimizer(self, path: str, optimizer: Optimizer) -> None:
        holder = state_holder(path, optimizer)
        found = states_of(path, holder)
        states, names = found.states, self._named(path, holder)
        if self._stored is not None:
            states = self._with_stored(path, holder, states, names)
        for parameter, (root, name) in names.items():
            for key in states[parameter]:
                self._parameter_state(path, (root, name), key, parameter, states[parameter])
        of_none = {"of_none": found.of_none, "attributes": found.attributes or {}}
        for kind, takes in (("of_none", True), ("attributes", found.attributes is not None)):
            kind_path = _joined(path, kind)
            if of_none[kind] if self._stored is None else takes and self._stored.holds(kind_path):
                self._nested(kind_path, of_none[kind], partial(_set, of_none, kind))
        self._groups(path, optimizer)
        if self._stored is not None:
            self._found.finish.append(lambda: found.put(states, of_none["of_none"], of_none["attributes"]))

    def _with_stored(
        self,
        path: str,
        optimizer: Optimizer,
        states: dict[torch.Tensor, dict[str, Any]],
        names: Mapping[torch.Tensor, tuple[str, str]],
    ) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the states to fill: present ones, and new ones for stored states; empty if nothing is stored."""
        assert self._stored is not None
        tensors_of, values_of = self._stored.tensors_by_owner, self._stored.values_by_owner
        in_parts = {owner.rpartition(".")[0] for owner in tensors_of if owner not in self._stored.values()}
        prefixes = {
            parameter: [(logical, _state_path(path, root, logical)) for logical in logical_names(parameter, name)]
            for parameter, (root, name) in names.items()
        }
        stored = {*tensors_of, *values_of, *in_parts}
        for parameter, found in prefixes.items():
            if found and not any(prefix in stored for _, prefix in found):  # the parameter had no gradient yet
                states[parameter] = {}
        if any(prefix in in_parts and not states[p] for p, found in prefixes.items() for _, prefix in found):
            states = states | fresh_states(path, optimizer)
        for parameter, (_, name) in names.items():
            state = states[parameter]
            for logical, prefix in prefixes[parameter]:
                for key, info in tensors_of.get(prefix, {}).items():
                    if key != _MASTER or key in state:  # saved by an optimizer with master weights, unlike this one
                        state[key] = destination_of(state.get(key), info, parameter, optimizer, name, logical)
                for key in values_of.get(prefix, {}):
                    if _is_tensor(state.get(key)) or key not in state:
                        state[key] = None  # a value takes its place
        return states

    def _parameter_state(
        self, path: str, named: tuple[str, str], key: str, parameter: torch.Tensor, state: dict[str, Any]
    ) -> None:
        """Add one state of a parameter, for each logical tensor in the parameter."""
        (root, name), part = named, state[key]
        own_path = _joined(_state_path(path, root, name), key)
        for logical in logical_names(parameter, name):
            state_path = _joined(_state_path(path, root, logical), key)
            cut = as_parameter_is_cut(own_path, name, part, parameter)
            if isinstance(cut, dict) and isinstance(part, torch.Tensor):
                self._boxes(state_path, cut[logical])
            elif _is_tensor(cut):
                self._tensor("", state_path, cut)
            else:
                if cut is not None and is_cut(parameter) and _holds(cut, _is_tensor):
                    raise ValueError(
                        f"{own_path!r} is a {type(cut).__name__} of tensors for a parameter that is split over ranks, "
                        "and the other ranks' parts are unknown; use an optimizer whose states are tensors"
                    )
                self._nested(state_path, cut, partial(_set, state, key))

    def _sharded_optimizer(self, path: str, optimizer: Any) -> None:
        """Add an optimizer whose states are spread over replicas and which reports what this rank holds."""
        others = {"": dict(optimizer.other_state())}
        others_path = _joined(path, "attributes")
        if self._stored is not None:
            optimizer.allocate_state(partial(self._stored_keys, path))
        self._sharded_entries(path, optimizer.sharded_state())
        if any(others[""].values()) if self._stored is None else self._stored.holds(others_path):
            self._nested(others_path, others[""], partial(_set, others, ""))
        self._groups(path, optimizer)
        if self._stored is not None:
            self._found.finish.append(lambda: optimizer.settle_state(others[""]))

    def _stored_keys(self, path: str, parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the states of a parameter in the checkpoint, so that its optimizer can allocate them."""
        assert self._stored is not None
        root, name = self._name_of(path, parameter)
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for logical in logical_names(parameter, name):
            prefix = _state_path(path, root, logical)
            infos = self._stored.tensors_by_owner.get(prefix, {})
            found.update({key: (info.dtype, info.global_shape) for key, info in infos.items()})
            for key, value in self._stored.values_by_owner.get(prefix, {}).items():
                found[key] = (torch.int64 if isinstance(value, int) else torch.float64, ())
        return found

    def _sharded_entries(self, path: str, entries: Any) -> None:
        """Add the entries that an optimizer's `sharded_state` returns."""
        for entry in entries:
            root, name = self._name_of(path, entry.parameter)
            shards: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
            for shard in entry.shards:
                full_name = relative_name(name, shard.name)
                found = shards.setdefault((full_name, tuple(shard.logical_shape)), [])
                found.append(Shard(shard.tensor.detach(), tuple(shard.box.offset)))
            for (logical, shape), found in shards.items():
                self._boxes(_joined(_state_path(path, root, logical), entry.key), ShardedTensor(shape, found))
            if entry.scalar is None:
                continue
            for logical in logical_names(entry.parameter, name):
                scalar_path = _joined(_state_path(path, root, logical), entry.key)
                if self._stored is not None and scalar_path in self._stored.values():
                    self._value(scalar_path, None, entry.scalar.fill_)
                else:
                    self._add(scalar_path, entry.scalar)

    def _groups(self, path: str, optimizer: Optimizer) -> None:
        """Add the options of an optimizer's groups, with the names of their parameters."""
        names: list[list[str]] = []
        for group in optimizer.param_groups:
            places = [(it, *self._name_of(path, it)) for it in group["params"]]
            names.append([_joined(root, it) for p, root, name in places for it in logical_names(p, name) or [name]])
        groups_path = _joined(path, "param_groups")
        groups = [
            {**options_of(group), "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)
        ]
        check_json(groups, groups_path)
        self._value(groups_path, groups)
        self._found.groups.add(groups_path)
        if self._stored is not None and self._stored.holds(groups_path):
            options = stored_options(path, names, self._stored.values()[groups_path])
            self._found.finish.append(lambda: set_groups(optimizer, options))

    def _named(self, path: str, optimizer: Optimizer) -> dict[torch.Tensor, tuple[str, str]]:
        return {p: self._name_of(path, p) for group in optimizer.param_groups for p in group["params"]}

    def _name_of(self, path: str, parameter: torch.Tensor) -> tuple[str, str]:
        if id(parameter) not in self._names:
            raise ValueError(
                f"{path!r} has a parameter {list(parameter.shape)} that does not belong to a module in the state; add "
                "its model to the state"
            )
        return self._names[id(parameter)]


def _items(path: str, parts: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(parts, Mapping):
        yield from enumerate(parts)
        return
    for key, part in parts.items():
        if not isinstance(key, str | int):
            raise ValueError(f"{path or 'the state'} has the key {key!r}; use strings or integers as keys")
        yield key, part


def _set(parts: Any, key: Any, value: Any) -> None:
    parts[key] = value


def _joined(path: str, key: Any) -> str:
    return f"{path}.{key}" if path and key != "" else path or str(key)


def _holds_objects(part: Any) -> bool:
    """Whether a part contains anything besides keys, numbers and strings."""
    return _holds(part, lambda it: not (it is None or isinstance(it, bool | int | float | str)))


def _holds(part: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether `wanted` is true for anything in nested dicts, lists and tuples."""
    if not isinstance(part, Mapping | list | tuple):
        return wanted(part)
    return any(_holds(it, wanted) for it in (part.values() if isinstance(part, Mapping) else part))


def _state_path(path: str, root: str, logical: str) -> str:
    """Return the path of the states of a logical tensor."""
    return _joined(path, f"state.{_joined(root, logical)}")


def _is_tensor(part: Any) -> bool:
    return isinstance(part, torch.Tensor | ShardedTensor) or is_sharded_tensor_of_torch(part)


def _holds_more_than_tensors(part: Any) -> bool:
    """Whether a part contains modules, optimizers or other objects with a state."""
    return _holds(part, lambda it: not _is_tensor(it) and (isinstance(it, PerRank) or hasattr(it, "state_dict")))


def _modules(state: Any, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a state with their paths."""
    if isinstance(state, nn.Module):
        yield path, state
    elif isinstance(state, Mapping | list | tuple):
        for key, part in _items(path, state):
            yield from _modules(part, _joined(path, key))


def _encoded(path: str, value: Any) -> Any:
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
        return {key: _encoded(_joined(path, key), it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(_joined(path, index), it) for index, it in enumerate(value)]
    return value


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
