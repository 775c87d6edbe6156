"""Optimizer states: created if a checkpoint has them and the optimizer does not, and split like its parameters."""

import sys
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from nxd_ckpt.distributed_tensors import is_dtensor, is_subclass, local_box, local_tensor
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.shard_marks import is_sharded, logical_parts, logical_shape
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor

_States = Mapping[torch.Tensor, Mapping[str, Any]]


@dataclass(frozen=True)
class OptimizerStates:
    """The state of an optimizer, apart from its groups.

    Attributes:
        states: the states of each parameter, by key; a copy of the dicts, with the optimizer's own tensors.
        of_none: entries of its state that do not belong to a parameter.
        attributes: the entries that its own `state_dict` adds; None if it does not override `state_dict`.
        put: function that hands all three to the optimizer.
    """

    states: dict[torch.Tensor, dict[str, Any]]
    of_none: dict[Any, Any]
    attributes: dict[str, Any] | None
    put: Callable[[_States, Mapping[Any, Any], Mapping[str, Any]], None]


def is_sharded_optimizer(value: Any) -> bool:
    """Whether an optimizer reports which boxes of logical tensors its states are, as NeuronZero1Optimizer does."""
    names = ("sharded_state", "other_state", "allocate_state", "finish_loading", "param_groups")
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def is_sharded_state(value: Any) -> bool:
    """Whether a value was returned by the `sharded_state` of such an optimizer."""
    names = ("parameter", "key", "shards", "scalar")
    return isinstance(value, list) and bool(value) and all(hasattr(it, name) for it in value for name in names)


def check_state_dict(path: str, content: Any, shapes_of_parts: Container[tuple[int, ...]]) -> None:
    """Refuse the `state_dict` of an optimizer of parts: it does not say which parameters its states belong to.

    Raises:
        ValueError: a state has the shape of a part.
    """
    for index, state in content["state"].items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, torch.Tensor) and value.ndim and tuple(value.shape) in shapes_of_parts:
                raise ValueError(
                    f"'{path}.state.{index}.{key}' {list(value.shape)} has the shape of a parameter that is a part of "
                    "another, and nothing says which part it is; pass the optimizer itself"
                )


def is_state_dict_of_optimizer(content: Any) -> bool:
    """Whether a value has the form of a torch optimizer's `state_dict`."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("state"), Mapping)
        and isinstance(content.get("param_groups"), list)
    )


def state_holder(path: str, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the states; for a ZeroRedundancyOptimizer, the one that this rank steps."""
    zero = sys.modules.get("torch.distributed.optim")
    if zero is None or not isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return optimizer
    if not hasattr(optimizer, "optim"):
        raise ValueError(
            f"{path!r} is a ZeroRedundancyOptimizer that has not stepped with its DDP yet; take a step first"
        )
    held: Optimizer = optimizer.optim
    return held


def states_of(path: str, optimizer: Optimizer) -> OptimizerStates:
    """Return the states of a torch optimizer.

    Raises:
        ValueError: it has states that cannot be assigned to parameters.
    """
    if _has_own_state_dict(optimizer):
        return _states_by_state_dict(path, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = set(map(id, parameters))
    of_none = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    if strangers := [it for it in optimizer.state if isinstance(it, torch.Tensor) and id(it) not in known]:
        raise ValueError(
            f"{path!r} has state for a tensor {list(strangers[0].shape)} that is not in any of its groups; remove it"
        )

    def put(states: _States, of_none: Mapping[Any, Any], attributes: Mapping[str, Any]) -> None:
        for parameter, state in states.items():
            if state:
                optimizer.state[parameter] = dict(state)
            else:
                optimizer.state.pop(parameter, None)
        optimizer.state.update(of_none)

    states = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in parameters}
    return OptimizerStates(states, of_none, None, put)


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return (
        kind.state_dict is not Optimizer.state_dict
        or kind.load_state_dict is not Optimizer.load_state_dict
        or any(
            getattr(optimizer, f"_optimizer_{hooks}_hooks", None)
            for hooks in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
        )
    )


def _states_by_state_dict(path: str, optimizer: Optimizer) -> OptimizerStates:
    """Return the states of an optimizer that overrides or hooks `state_dict`, which saves and loads them."""
    kind = type(optimizer).__name__
    try:
        given = optimizer.state_dict()
    except Exception as error:  # whatever an optimizer raises
        raise ValueError(
            f"the state_dict of {path!r}, a {kind}, failed: {type(error).__name__}: {error}; save the state of each "
            "rank yourself"
        ) from error
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = _indices_of(given, parameters)
    if indices is None:
        raise ValueError(
            f"{path!r} is a {kind}, whose state_dict is not in torch's form (states by parameter index), so it is "
            "unknown which states belong to which parameter; pass the optimizer that it wraps, or give the class "
            "sharded_state and its companions (as NeuronZero1Optimizer of nxd-optim has)"
        )
    states = {p: dict(given["state"].get(index, {})) for index, p in zip(indices, parameters, strict=True)}
    of_none = {key: value for key, value in given["state"].items() if key not in set(indices)}
    attributes = {key: value for key, value in given.items() if key not in ("state", "param_groups")}

    def put(states: _States, of_none: Mapping[Any, Any], attributes: Mapping[str, Any]) -> None:
        by_index: dict[Any, Any] = {
            index: dict(states[p]) for index, p in zip(indices, parameters, strict=True) if states.get(p)
        }
        groups = [
            {**group, "params": own["params"]}
            for group, own in zip(optimizer.param_groups, given["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({**given, **attributes, "state": {**by_index, **of_none}, "param_groups": groups})
        _keep_dtypes(optimizer, states)

    return OptimizerStates(states, of_none, attributes, put)


def _indices_of(given: Any, parameters: Sequence[torch.Tensor]) -> list[Any] | None:
    """Return the index of each parameter in a state dict; None if it is not in torch's form."""
    if not (isinstance(given, Mapping) and isinstance(given.get("state"), Mapping)):
        return None
    groups = given.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(it, Mapping) and "params" in it for it in groups):
        return None
    indices = [index for group in groups for index in group["params"]]
    if len(indices) != len(parameters) or not all(isinstance(index, int | str) for index in indices):
        return None
    return indices if all(isinstance(given["state"].get(index, {}), Mapping) for index in indices) else None


def _keep_dtypes(optimizer: Optimizer, states: _States) -> None:
    """Restore the dtypes of states that torch's `load_state_dict` has converted to those of the parameters."""
    for parameter, state in states.items():
        mine = optimizer.state.get(parameter, {})
        for key, value in state.items():
            own = mine.get(key)
            if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and own.dtype != value.dtype:
                mine[key] = value


def by_owner(names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group values by path, with their last keys."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in names.items():
        owner, _, key = name.rpartition(".")
        found[owner][key] = value
    return found


def fresh_states(path: str, optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the states that an optimizer lacks, created by a step with zero gradients and a learning rate of zero.

    For states that are objects of classes that only the optimizer knows. The optimizer does not hold them yet when this
    returns.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lacking = [it for it in parameters if it.requires_grad and not optimizer.state.get(it)]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in lacking:
        parameter.grad = torch.zeros_like(parameter)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    try:
        optimizer.step()
    except Exception as error:  # whatever an optimizer raises
        raise ValueError(
            f"{path!r} has no states yet, and a step with zero gradients to create them failed with "
            f"{type(error).__name__}: {error}; take a step before you load"
        ) from error
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    return {parameter: dict(optimizer.state.pop(parameter, {})) for parameter in lacking}


def sharded_like_parameter(path: str, name: str, part: Any, parameter: Any) -> Any:
    """Return a state of a parameter that is split over ranks as boxes.

    Returns:
        A dict of boxes by logical tensor name, one box, or the unchanged state.
    """
    if is_dtensor(part) or not isinstance(part, torch.Tensor) or part.ndim == 0:
        return part
    boxes = None if is_subclass(part) or part.shape != parameter.shape else logical_parts(part, name, like=parameter)
    if boxes is not None:
        return boxes
    if is_sharded(parameter):
        if part.numel() == 1:
            return part
        held, shape = list(parameter.shape), "split over ranks"
    else:
        if not is_dtensor(parameter):
            return part
        box = local_box(parameter)
        if box is None or box.shape == tuple(parameter.shape) or (part.numel() == 1 and tuple(part.shape) != box.shape):
            return part
        if tuple(part.shape) == box.shape and not is_subclass(part):
            return ShardedTensor(parameter.shape, [Shard(part, box.offsets)] if box.num_elements else [], part.dtype)
        held, shape = list(box.shape), str(list(parameter.shape))
    raise ValueError(
        f"{path!r} is a plain {type(part).__name__} {list(part.shape)} for a parameter {shape} of which this rank "
        f"holds {held}, so the other ranks' parts are unknown; make it a DTensor, with Replicate() if it is equal on "
        "all ranks"
    )


def destination_of(
    present: Any, info: TensorInfo, parameter: Any, optimizer: Optimizer, name: str, logical: str
) -> torch.Tensor:
    """Return a tensor to load a state of a parameter into: the present one, or a new one split like the parameter."""
    whole = logical_shape(parameter, name, logical)
    shapes = [info.global_shape]
    if whole == info.global_shape:
        shapes = [
            tuple((local_tensor(parameter) if is_dtensor(parameter) else parameter).shape),
            tuple(parameter.shape),
        ]
    if isinstance(present, torch.Tensor) and tuple(present.shape) in shapes and present.dtype == info.dtype:
        return present
    if whole == info.global_shape:
        return torch.zeros_like(parameter, dtype=info.dtype, requires_grad=False)
    group = next(it for it in optimizer.param_groups if any(parameter is other for other in it["params"]))
    # Step counts are on the CPU, unless the optimizer is fused or capturable.
    on_device = len(info.global_shape) > 0 or group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.zeros(info.global_shape, dtype=info.dtype, device=device)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group; tensors, such as a learning rate, as numbers."""
    options = {key: option for key, option in group.items() if key != "params"}
    return {key: option.item() if isinstance(option, torch.Tensor) else option for key, option in options.items()}


def stored_options(path: str, names: list[list[str]], stored: Any) -> list[dict[str, Any]]:
    """Return the stored options for each group: those of the groups that its parameters were in.

    Raises:
        ValueError: parameters of one group were in groups with different options.
    """
    if not isinstance(stored, list) or not all(
        isinstance(it, dict) and isinstance(it.get("params"), list) for it in stored
    ):
        raise ValueError(f"the stored groups of {path!r} are not a list of groups with parameter names")
    taken: list[dict[str, Any]] = []
    for index, group in enumerate(names):
        found = [it for it in stored if set(group) & set(it["params"])]
        if not group:  # for example, all of its parameters are on other ranks
            found = [
                it for it in stored[index : index + 1] if not any(set(it["params"]) & set(other) for other in names)
            ]
        options = [{key: option for key, option in it.items() if key != "params"} for it in found]
        if any(it != options[0] for it in options):
            key = next(key for it in options for key in it if it[key] != options[0].get(key))
            raise ValueError(
                f"group {index} of {path!r} has parameters that were in groups with different options: {key} was "
                f"{[it.get(key) for it in options]}; create the optimizer with the groups that it was saved with"
            )
        taken.append(options[0] if options else {})
    return taken


def merged_groups(of_ranks: Sequence[Any]) -> list[dict[str, Any]]:
    """Merge the groups of all ranks, which may hold different parameters, into one list."""
    merged: list[dict[str, Any]] = []
    for groups in of_ranks:
        for index, group in enumerate(groups):
            options = {key: option for key, option in group.items() if key != "params"}
            same = [it for it in merged[index : index + 1] if {**it, "params": None} == {**options, "params": None}]
            if same:
                same[0]["params"] += [name for name in group["params"] if name not in set(same[0]["params"])]
            elif index >= len(merged) or group["params"]:
                merged.append({**options, "params": list(group["params"])})
    return merged


def set_groups(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Set each group's options; tensors, such as a learning rate, stay tensors."""
    for group, own in zip(optimizer.param_groups, options, strict=True):
        for key, option in own.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(option)
            else:
                group[key] = tuple(option) if isinstance(group.get(key), tuple) else option
