"""The state of a model's optimizer as logical tensors, and the states that an optimizer takes from a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from nxd_ckpt import Shard, ShardedTensor
from nxd_ckpt.optimizer_states import states_of
from nxd_ckpt.shard_marks import is_sharded
from nxd_optim import MASTER_KEY, Adafactor, NeuronZero1Optimizer, give_states, restore_numbers, state_tensor
from nxd_state import active_group, get_shard_spec
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_engine.checkpoints.state import (
    OPTIMIZER_PREFIX,
    CheckpointState,
    logical_name,
    logical_names_of,
    logical_tensors,
    owner_of,
    parameters_in_checkpoint,
)

_ONLY_ZERO1 = {"skipped_steps"}  # other optimizers ignore it


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> CheckpointState:
    """Return the optimizer's state as logical tensors; states of a parameter's shape are sharded like the parameter.

    With ZeRO each rank contributes the boxes that it owns; names, shapes and values are the same as without it, so
    a checkpoint of one loads into the other.
    """
    if isinstance(optimizer, NeuronZero1Optimizer | Adafactor):
        return _state_in_boxes(model, optimizer)
    state: CheckpointState = {}
    for name, parameter in _optimized_parameters(model, optimizer):
        for key, found in optimizer.state.get(parameter, {}).items():
            value = state_tensor(found, key, name)
            if value.shape == parameter.shape:
                for logical, tensor in logical_tensors(name, parameter, value).items():
                    state[f"{OPTIMIZER_PREFIX}{logical}/{key}"] = tensor
            elif value.numel() > 1 and is_sharded(parameter):
                raise ValueError(
                    f"optimizer state {key!r} of {name} is {list(value.shape)}, but this rank's part of the parameter "
                    f"is {list(parameter.shape)}, so it is unknown which part other ranks hold; use an elementwise "
                    "optimizer with tensor parallelism, or nxd_optim.Adafactor"
                )
            else:  # such as a step count, which each logical tensor of a fused parameter has
                names = logical_names_of(name, parameter)
                state.update({f"{OPTIMIZER_PREFIX}{logical}/{key}": value for logical in names})
    return state


def _state_in_boxes(model: nn.Module, optimizer: NeuronZero1Optimizer | Adafactor) -> CheckpointState:
    """Return the state of an optimizer that says which boxes of logical tensors it holds."""
    names = {parameter: name for name, parameter in _optimized_parameters(model, optimizer)}
    state: CheckpointState = {}
    shards: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for entry in optimizer.sharded_state():
        name = names[entry.parameter]
        if entry.scalar is not None:
            names_here = logical_names_of(name, entry.parameter)
            state.update({f"{OPTIMIZER_PREFIX}{logical}/{entry.key}": entry.scalar for logical in names_here})
        for shard in entry.shards:
            full_name = f"{OPTIMIZER_PREFIX}{logical_name(name, shard.name)}/{entry.key}"
            shards.setdefault((full_name, shard.logical_shape), []).append(Shard(shard.tensor, shard.box.offset))
    return state | {name: ShardedTensor(shape, found) for (name, shape), found in shards.items()}


def weights_of_wider_masters(model: nn.Module, optimizer: Optimizer) -> set[str]:
    """Return the model's tensors that `optimizer_state` also holds as wider master weights, if ZeRO saves them."""
    if not isinstance(optimizer, NeuronZero1Optimizer):
        return set()
    names = {parameter: name for name, parameter in _optimized_parameters(model, optimizer)}
    wider = optimizer.parameters_of_wider_masters()
    return {logical for parameter in wider for logical in logical_names_of(names[parameter], parameter)}


def allocate_optimizer_state(
    model: nn.Module, optimizer: Optimizer, stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    """Allocate the state that a checkpoint holds in a new optimizer, so that it can be loaded in place.

    ZeRO master weights that the checkpoint lacks are taken from the parameters at the next step. Tensors are
    allocated in the dtypes in which the optimizer keeps its states, whatever dtypes the checkpoint has.
    """
    keys_by_name: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for full_name, description in stored.items():
        if full_name.startswith(OPTIMIZER_PREFIX):
            key = full_name.rpartition("/")[2]
            keys_by_name.setdefault(owner_of(full_name), {})[key] = description
    names = {parameter: name for name, parameter in _optimized_parameters(model, optimizer)}

    def stored_keys(parameter: Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            key: description
            for logical in [names[parameter], *logical_names_of(names[parameter], parameter)]
            for key, description in keys_by_name.get(logical, {}).items()
        }

    if isinstance(optimizer, NeuronZero1Optimizer | Adafactor):
        optimizer.allocate_state(stored_keys)
        return

    def has_its_elements(shape: tuple[int, ...], parameter: Tensor) -> bool:
        spec = get_shard_spec(parameter)
        if spec is None:
            return shape == parameter.shape
        if not spec.pieces:  # this rank holds only padding, whatever the logical shape
            return len(shape) == parameter.dim()
        return any(shape == piece.logical_shape for piece in spec.pieces)

    def room(parameter: Tensor) -> dict[str, Tensor]:
        return {
            key: torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if has_its_elements(shape, parameter)
            else torch.zeros(shape, dtype=dtype)
            for key, (dtype, shape) in stored_keys(parameter).items()
            if key != MASTER_KEY
        }

    give_states(optimizer, {parameter: room(parameter) for parameter in names})


def settle_optimizer_state(optimizer: Optimizer, others: Mapping[str, Any]) -> None:
    """Finish loading: call it when the states allocated by `allocate_optimizer_state` have been filled."""
    attributes = others.get("attributes", {})
    is_zero1 = isinstance(optimizer, NeuronZero1Optimizer)
    found = states_of("the optimizer", optimizer) if others and not is_zero1 else None
    takes = optimizer.other_state() if isinstance(optimizer, NeuronZero1Optimizer) else found and found.attributes
    lacking = attributes.keys() - _ONLY_ZERO1 - (takes or {}).keys()
    if lacking:
        raise ValueError(
            f"the optimizer was saved with {sorted(lacking)} by its own state_dict, which {type(optimizer).__name__} "
            "does not have; load into the class that was saved"
        )
    if isinstance(optimizer, NeuronZero1Optimizer):
        optimizer.finish_loading(attributes)
        return
    restore_numbers(optimizer)
    if found is not None:
        found.put(found.states, others.get("of_none", {}), attributes)


def other_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state that an optimizer keeps outside its parameters' states and groups; empty if there is none."""
    if isinstance(optimizer, NeuronZero1Optimizer):
        numbers = {key: value for key, value in optimizer.other_state().items() if value}
        return {"attributes": numbers} if numbers else {}
    found = states_of("the optimizer", optimizer)
    others = {key: value for key, value in (("of_none", found.of_none), ("attributes", found.attributes)) if value}
    if active_group("tp").size * active_group("pp").size > 1 and any(isinstance(it, Tensor) for it in _leaves(others)):
        raise ValueError(
            f"the {type(optimizer).__name__} keeps tensors that belong to no parameter ({', '.join(_names(others))}); "
            "it is unknown which part of the model they belong to, so they cannot be saved with tensor or pipeline "
            "parallelism"
        )
    return others


def _names(others: Mapping[str, Any]) -> list[str]:
    return sorted(str(key) for kind in others.values() for key in kind)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value


def _optimized_parameters(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters_in_checkpoint(model)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer holds a {tuple(parameter.shape)} parameter that the model does not have"
                )
            yield names[parameter], parameter
