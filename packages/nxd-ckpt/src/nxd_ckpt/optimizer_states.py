"""States of optimizers: made where a checkpoint has them and the optimizer has none, and cut as its parameters are."""

import sys
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from nxd_ckpt.distributed_tensors import is_dtensor, local_box, local_tensor
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.shard_marks import is_cut, logical_parts, logical_shape
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor
from nxd_ckpt.tensor_subclasses import is_subclass

_States = Mapping[torch.Tensor, Mapping[str, Any]]


@dataclass(frozen=True)
class OptimizerStates:
    """What an optimizer would lose if it were not saved, apart from its groups.

    Attributes:
        states: of each of its parameters, by key; a copy, of the optimizer's own tensors.
        of_none: entries of its state that belong to no parameter.
        attributes: what its own `state_dict` adds; None if it has none of its own.
        put: hands all three to the optimizer.
    """

    states: dict[torch.Tensor, dict[str, Any]]
    of_none: dict[Any, Any]
    attributes: dict[str, Any] | None
    put: Callable[[_States, Mapping[Any, Any], Mapping[str, Any]], None]


def is_sharded_optimizer(value: Any) -> bool:
    """Whether it says itself which boxes of logical tensors its states are; see the README."""
    names = ("sharded_state", "other_state", "allocate_state", "settle_state", "param_groups")
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def is_sharded_state(value: Any) -> bool:
    """Whether it is what `sharded_state` of such an optimizer returns."""
    names = ("parameter", "key", "shards", "scalar")
    return isinstance(value, list) and bool(value) and all(hasattr(it, name) for it in value for name in names)


def check_state_dict(path: str, content: Any, shapes_of_parts: Container[tuple[int, ...]]) -> None:
    """Refuse the `state_dict` of an optimizer of parts: it does not say of which parameters its states are.

    Args:
        path: its path, for messages.
        content: any mapping.
        shapes_of_parts: those of the parameters in this process that are parts.

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
    """Whether it is what `state_dict` of a torch optimizer returns."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("state"), Mapping)
        and isinstance(content.get("param_groups"), list)
    )


def state_holder(path: str, optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the states: of a ZeroRedundancyOptimizer that of the parameters that this rank updates."""
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
    """The states of an optimizer of torch's kind.

    Raises:
        ValueError: it has states of its own that cannot be told apart by parameters.
    """
    if _has_own_state_dict(optimizer):
        return _states_by_its_own(path, optimizer)
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


def _states_by_its_own(path: str, optimizer: Optimizer) -> OptimizerStates:
    """The states of an optimizer whose `state_dict` is its own, or changed by hooks: through that, both ways."""
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
            "sharded_state and its companions (see the README of nxd-ckpt)"
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
    """The index of each parameter in a state dict; None if it is not of torch's form."""
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
    """Give states back the dtypes that torch's `load_state_dict` has changed to those of the parameters."""
    for parameter, state in states.items():
        mine = optimizer.state.get(parameter, {})
        for key, value in state.items():
            own = mine.get(key)
            if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and own.dtype != value.dtype:
                mine[key] = value


def by_owner(names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What lies below each path, by its last key."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in names.items():
        owner, _, key = name.rpartition(".")
        found[owner][key] = value
    return found


def fresh_states(path: str, optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """The states that an optimizer lacks, as it makes them itself: by a step with gradients of zero and a rate of zero.

    For states that are no tensors of their own but objects of classes that only the optimizer knows. It does not have
    them yet when this returns.
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


def as_parameter_is_cut(path: str, name: str, part: Any, parameter: Any) -> Any:
    """A state of a parameter that is cut over ranks, as boxes.

    Args:
        path: the state's, for messages.
        name: the parameter's in its module.
        part: the state.
        parameter: the parameter.

    Returns:
        Boxes by the names of logical tensors in a dict, one box, or the state as it is.
    """
    if is_dtensor(part) or not isinstance(part, torch.Tensor) or part.ndim == 0:
        return part
    boxes = None if is_subclass(part) or part.shape != parameter.shape else logical_parts(part, name, like=parameter)
    if boxes is not None:
        return boxes
    if is_cut(parameter):
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
    """A tensor to load a state of a parameter into: the one that is there, or one cut like the parameter.

    Args:
        present: what there is.
        info: what is stored.
        parameter: the parameter.
        optimizer: whose state it is.
        name: the parameter's in its module.
        logical: that of the logical tensor in it whose state is stored.
    """
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
    # Counts of steps are on the CPU, unless the step is one kernel or one graph.
    on_device = len(info.global_shape) > 0 or group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.zeros(info.global_shape, dtype=info.dtype, device=device)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group of parameters; what is a tensor, such as a learning rate, as a number."""
    options = {key: option for key, option in group.items() if key != "params"}
    return {key: option.item() if isinstance(option, torch.Tensor) else option for key, option in options.items()}


def stored_options(path: str, names: list[list[str]], stored: Any) -> list[dict[str, Any]]:
    """The stored options for each group: those of the groups that its parameters were in.

    Args:
        path: the optimizer's, for messages.
        names: the parameters of each group.
        stored: the groups of the checkpoint.

    Raises:
        ValueError: parameters of one group were in groups of different options.
    """
    if not isinstance(stored, list) or not all(
        isinstance(it, dict) and isinstance(it.get("params"), list) for it in stored
    ):
        raise ValueError(f"the stored groups of {path!r} are not a list of groups with parameter names")
    taken: list[dict[str, Any]] = []
    for index, group in enumerate(names):
        found = [it for it in stored if set(group) & set(it["params"])]
        if not group:  # such as one whose parameters are all on other ranks
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
    """The groups of all ranks, which may have other parameters: a list in which each parameter is in its group."""
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
    """Give each group its options; what is a tensor there, such as a learning rate, stays one."""
    for group, own in zip(optimizer.param_groups, options, strict=True):
        for key, option in own.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(option)
            else:
                group[key] = tuple(option) if isinstance(group.get(key), tuple) else option
