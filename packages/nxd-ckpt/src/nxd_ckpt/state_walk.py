"""Walks through a trainer's state (modules, optimizers, numbers, dicts and lists) and names its tensors and values."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxd_ckpt.distributed_tensors import as_boxes, is_dtensor, is_subclass, parts_of
from nxd_ckpt.module_states import (
    is_extra_state,
    is_state_dict,
    load_into_module,
    module_state,
    named_parameters,
    parts_by_place,
    plain_name,
    with_parts,
)
from nxd_ckpt.objects import check_json, decode, encode, references
from nxd_ckpt.optimizer_states import (
    check_state_dict,
    destination_of,
    fresh_states,
    is_sharded_optimizer,
    is_sharded_state,
    is_state_dict_of_optimizer,
    options_of,
    set_groups,
    sharded_like_parameter,
    state_holder,
    states_of,
    stored_options,
)
from nxd_ckpt.shard_marks import check_known, check_no_copy, is_sharded, logical_names, logical_parts, relative_name
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor
from nxd_ckpt.training_state import (
    PerRank,
    Stored,
    TrainingState,
    decode_rank_value,
    encode_rank_value,
    holds,
    holds_more_than_tensors,
    holds_objects,
    is_tensor,
    items_of,
    joined,
    modules_in,
)

_ONE_TENSOR = {"$tensor": ""}  # a value that is a single tensor
_MASTER = "master_weight"  # the key of a state that is the parameter's value in another dtype
_LARGEST_BUFFER = 2**20  # bytes; a state_dict does not say which of its tensors are parameters


def flatten_state(state: Any, stored: Stored | None = None, *, several_ranks: bool = False) -> TrainingState:
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
        return {
            id(it): (path, name) for path, module in modules_in(self._state) for name, it in named_parameters(module)
        }

    @cached_property
    def _parts_by_place(self) -> dict[Any, nn.Parameter]:
        """The parameters that are parts, looked up once, if the state has a module's `state_dict`."""
        return parts_by_place()

    def container(self, path: str, parts: Any) -> None:
        content = with_parts(parts, self._parts_by_place) if is_state_dict(parts) else parts
        if self._several_ranks and is_state_dict_of_optimizer(content):
            shapes = {tuple(it.shape) for it in self._parts_by_place.values() if not is_dtensor(it)}
            check_state_dict(path, content, shapes)
        for key, part in items_of(path, content):
            if isinstance(parts, tuple) and self._stored is not None and not holds_objects(part):
                raise ValueError(f"{joined(path, key)!r} is {part!r} in a tuple, which cannot be replaced; use a list")
            self.part(path, str(key), part, partial(_set, parts, key))

    def part(self, root: str, name: str, part: Any, set_part: Callable[[Any], None]) -> None:
        path = joined(root, name)
        if is_tensor(part):
            if self._several_ranks and isinstance(part, torch.Tensor):
                with _at(path):
                    check_no_copy(part, name, self._parts_by_name)
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
        elif isinstance(part, Mapping | list | tuple) and holds_objects(part):
            self.container(path, part)
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            self._stateful(path, part)
        else:
            self._nested(path, part, set_part)

    @cached_property
    def _parts_by_name(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the module parameters in the state that are parts, by name."""
        named = [it for _, module in modules_in(self._state) for it in named_parameters(module)]
        return {name: tuple(parameter.shape) for name, parameter in named if is_sharded(parameter)}

    def _stateful(self, path: str, part: Any) -> None:
        own = {"": part.state_dict()}
        if holds_more_than_tensors(own[""]):
            self.container(path, own[""])
        else:
            self._nested(path, own[""], partial(_set, own, ""))
        self._found.finish.append(lambda: part.load_state_dict(own[""]))

    def _tensor(self, root: str, name: str, tensor: Any, *, first_holder: bool = False) -> None:
        path = joined(root, name)
        with _at(path):
            if self._several_ranks and isinstance(tensor, torch.Tensor):
                check_known(tensor)
            parts = parts_of(tensor) if is_subclass(tensor) else None
            cut = logical_parts(tensor, name) if isinstance(tensor, torch.Tensor) and parts is None else None
            boxes = as_boxes(tensor) if parts is None and cut is None else None
        if parts is not None:
            for inner, part in parts.items():
                self._tensor(root, joined(name, inner), part, first_holder=first_holder)
        elif cut is not None:
            for logical, found in cut.items():
                self._boxes(joined(root, logical), found, first_holder=first_holder)
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
        self._check_no_value(path)
        self._found.values[path] = value
        if set_value is not None:
            self._found.setters[path] = set_value

    def _check_no_value(self, path: str) -> None:
        if path in self._found.values or path in self._found.rank_values:
            raise ValueError(f"two values of the state are named {path!r}; rename a key")

    def _nested(self, path: str, value: Any, set_value: Callable[[Any], None]) -> None:
        """Add a value that is replaced as a whole; tensors in it are named by their paths."""
        tensors: dict[str, Any] = {}
        skeleton = encode(value, path, is_tensor, tensors)
        check_json(skeleton, path)
        if self._stored is None:
            if skeleton != _ONE_TENSOR:
                self._value(path, skeleton)
        elif self._stored.holds(path) or path in self._stored.tensors:
            stored = self._stored.values().get(path, _ONE_TENSOR)
            tensors = {name: self._destination(joined(path, name), tensors.get(name)) for name in references(stored)}
            if self._stored.holds(path):
                self._value(path, skeleton)
            self._found.finish.append(lambda: set_value(decode(stored, tensors, value)))
        elif isinstance(value, Mapping | list) and self._stored.holds_below(path):  # written by an earlier version
            self.container(path, value)
        else:
            self._value(path, skeleton)  # which the checkpoint lacks
        for name, tensor in tensors.items():
            self._tensor(path, name, tensor, first_holder=True)

    def _destination(self, path: str, present: Any) -> Any:
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
        value = encode_rank_value(path, part.value.state_dict() if stateful else part.value)
        check_json(value, path)
        self._check_no_value(path)
        self._found.rank_values[path] = value

        def set_value(loaded: Any) -> None:
            if stateful:
                part.value.load_state_dict(decode_rank_value(loaded))
            else:
                part.value = decode_rank_value(loaded)

        self._found.setters[path] = set_value

    def _module(self, path: str, module: nn.Module) -> None:
        with _at(path):
            state = module_state(module, several_ranks=self._several_ranks)
        before: dict[str, torch.Tensor] = {}
        for name, part in state.content.items():
            if name in state.own:
                self._tensor(path, plain_name(name), part, first_holder=name in state.buffers)
            elif isinstance(part, torch.Tensor) and not is_extra_state(name):
                self._tensor(path, plain_name(name), part, first_holder=True)
                if self._stored is not None and not is_dtensor(part) and not is_subclass(part):
                    before[name] = part.detach().clone()
            else:
                self._nested(joined(path, plain_name(name)), part, partial(_set, state.content, name))
        if self._stored is not None and not state.is_filled_in_place:
            self._found.finish.append(partial(load_into_module, path, state, before))

    def _optimizer(self, path: str, optimizer: Optimizer) -> None:
        holder = state_holder(path, optimizer)
        found = states_of(path, holder)
        states = found.states
        names = {p: self._name_of(path, p) for group in holder.param_groups for p in group["params"]}
        if self._stored is not None:
            states = self._with_stored(path, holder, states, names)
        for parameter, (root, name) in names.items():
            for key in states[parameter]:
                self._parameter_state(path, (root, name), key, parameter, states[parameter])
        of_none = {"of_none": found.of_none, "attributes": found.attributes or {}}
        for kind, takes in (("of_none", True), ("attributes", found.attributes is not None)):
            kind_path = joined(path, kind)
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
                    if is_tensor(state.get(key)) or key not in state:
                        state[key] = None  # a value takes its place
        return states

    def _parameter_state(
        self, path: str, named: tuple[str, str], key: str, parameter: torch.Tensor, state: dict[str, Any]
    ) -> None:
        """Add one state of a parameter, for each logical tensor in the parameter."""
        (root, name), part = named, state[key]
        own_path = joined(_state_path(path, root, name), key)
        for logical in logical_names(parameter, name):
            state_path = joined(_state_path(path, root, logical), key)
            cut = sharded_like_parameter(own_path, name, part, parameter)
            if isinstance(cut, dict) and isinstance(part, torch.Tensor):
                self._boxes(state_path, cut[logical])
            elif is_tensor(cut):
                self._tensor("", state_path, cut)
            else:
                if cut is not None and is_sharded(parameter) and holds(cut, is_tensor):
                    raise ValueError(
                        f"{own_path!r} is a {type(cut).__name__} of tensors for a parameter that is split over ranks, "
                        "and the other ranks' parts are unknown; use an optimizer whose states are tensors"
                    )
                self._nested(state_path, cut, partial(_set, state, key))

    def _sharded_optimizer(self, path: str, optimizer: Any) -> None:
        """Add an optimizer whose states are spread over replicas and which reports what this rank holds."""
        others = {"": dict(optimizer.other_state())}
        others_path = joined(path, "attributes")
        if self._stored is not None:
            stored = self._stored
            optimizer.allocate_state(lambda p: stored.keys_of(_logical_paths(path, *self._name_of(path, p), p)))
        self._sharded_entries(path, optimizer.sharded_state())
        if any(others[""].values()) if self._stored is None else self._stored.holds(others_path):
            self._nested(others_path, others[""], partial(_set, others, ""))
        self._groups(path, optimizer)
        if self._stored is not None:
            self._found.finish.append(lambda: optimizer.finish_loading(others[""]))

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
                self._boxes(joined(_state_path(path, root, logical), entry.key), ShardedTensor(shape, found))
            if entry.scalar is None:
                continue
            for logical in logical_names(entry.parameter, name):
                scalar_path = joined(_state_path(path, root, logical), entry.key)
                if self._stored is not None and scalar_path in self._stored.values():
                    self._value(scalar_path, None, entry.scalar.fill_)
                else:
                    self._add(scalar_path, entry.scalar)

    def _groups(self, path: str, optimizer: Optimizer) -> None:
        """Add the options of an optimizer's groups, with the names of their parameters."""
        names: list[list[str]] = []
        for group in optimizer.param_groups:
            places = [(it, *self._name_of(path, it)) for it in group["params"]]
            names.append([joined(root, it) for p, root, name in places for it in logical_names(p, name) or [name]])
        groups_path = joined(path, "param_groups")
        groups = [
            {**options_of(group), "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)
        ]
        check_json(groups, groups_path)
        self._value(groups_path, groups)
        self._found.groups.add(groups_path)
        if self._stored is not None and self._stored.holds(groups_path):
            options = stored_options(path, names, self._stored.values()[groups_path])
            self._found.finish.append(lambda: set_groups(optimizer, options))

    def _name_of(self, path: str, parameter: torch.Tensor) -> tuple[str, str]:
        if id(parameter) not in self._names:
            raise ValueError(
                f"{path!r} has a parameter {list(parameter.shape)} that does not belong to a module in the state; add "
                "its model to the state"
            )
        return self._names[id(parameter)]


def _set(parts: Any, key: Any, value: Any) -> None:
    parts[key] = value


def _logical_paths(path: str, root: str, name: str, parameter: torch.Tensor) -> list[str]:
    return [_state_path(path, root, logical) for logical in logical_names(parameter, name)]


def _state_path(path: str, root: str, logical: str) -> str:
    """Return the path of the states of a logical tensor."""
    return joined(path, f"state.{joined(root, logical)}")


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Add the path of a part to the errors in the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from None
