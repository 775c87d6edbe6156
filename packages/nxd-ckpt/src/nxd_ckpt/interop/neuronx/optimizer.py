"""The optimizer state of NeuronX Distributed, as parts of whole tensors named "optimizer/<parameter>/<key>".

Without ZeRO-1 it is the state of torch's optimizers, split like the parameters. With ZeRO-1 each data-parallel rank
holds rows of it: torch-xla's `ZeroRedundancyOptimizer` splits a rank's parameter along dimension 0, padded at the end.
With `use_zero1_dcp` the rows of all ranks form one tensor of a torch distributed checkpoint, which names the parameter.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.neuronx.rank_files import Rank
from nxd_ckpt.interop.neuronx.sharding import Degrees, LocalTensor, SavedBox, Sharding, check_storable, placements_of
from nxd_ckpt.interop.source import TensorSource, read_whole
from nxd_ckpt.interop.torch_files import OPTIMIZER_PREFIX

MASTER_KEY = "master_weight"

_ZERO1_STATE = "base_state"
_ZERO1_MASTERS = "sharded_master_weights"

# As in "base_state.layer.weight.exp_avg|pp-0001|tp-0003"; a rank is left out if there is only one.
_DCP_NAME = re.compile(r"base_state\.(?P<name>.+)\.(?P<key>[^.|]+)(?:\|pp-(?P<pp>\d+))?(?:\|tp-(?P<tp>\d+))?")
_DCP_GROUP = re.compile(r"param_groups\.(?P<group>\d{1,4})\.(?P<key>.+)")

ParameterNames = Sequence[str] | Mapping[int, Sequence[str]]


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """One tensor of one rank's optimizer state."""

    parameter: str
    key: str
    tensor: torch.Tensor
    is_row_shard: bool


def placed_optimizer_tensors(
    states: Mapping[Rank, Any],
    model: Sequence[LocalTensor],
    sharding: Mapping[str, Sharding],
    degrees: Degrees,
    parameter_names: ParameterNames,
) -> dict[str, list[SavedBox]]:
    """Return the parts of each whole tensor of the optimizer state.

    Raises:
        CheckpointError: a parameter has no name or no weight, or its state has another shape.
    """

    def entries() -> Iterator[tuple[Rank, _StateTensor]]:
        for rank, state in states.items():
            names = parameter_names.get(rank.pp, ()) if isinstance(parameter_names, Mapping) else parameter_names
            for entry in _state_tensors(state, names, rank):
                yield rank, entry

    return _placed(entries(), model, sharding, degrees)


def placed_dcp_tensors(
    saved: TensorSource, model: Sequence[LocalTensor], sharding: Mapping[str, Sharding], degrees: Degrees
) -> dict[str, list[SavedBox]]:
    """Return the parts of each tensor that `save_checkpoint(use_zero1_dcp=True)` wrote to the folder `optim`.

    Raises:
        CheckpointError: a parameter is not in the model, or its state has another shape.
    """
    holders: dict[str, Rank] = {}
    for local in model:
        holders.setdefault(local.name, local.rank)

    def entries() -> Iterator[tuple[Rank, _StateTensor]]:
        for name in saved.tensors:
            match = _DCP_NAME.fullmatch(name)
            if match is None:
                warnings.warn(
                    f"leaving out {name!r} of the optimizer, which is not the state of a parameter", stacklevel=4
                )
                continue
            holder = holders.get(match["name"], Rank(0, 0, 0, 0))
            rank = Rank(int(match["pp"] or holder.pp), 0, int(match["tp"] or 0), 0)
            yield rank, _StateTensor(match["name"], match["key"], read_whole(saved, name), is_row_shard=False)

    return _placed(entries(), model, sharding, degrees)


def dcp_parameter_groups(saved: TensorSource) -> list[dict[str, Any]]:
    """Return the hyperparameters of the groups in a folder for `placed_dcp_tensors`, without parameter numbers."""
    groups: dict[int, dict[str, Any]] = {}
    for name, value in (saved.objects or {}).items():
        match = _DCP_GROUP.fullmatch(name)
        if match is not None and match["key"] != "params":
            groups.setdefault(int(match["group"]), {})[match["key"]] = value
    return [group for _, group in sorted(groups.items())]


def _placed(
    entries: Iterable[tuple[Rank, _StateTensor]],
    model: Sequence[LocalTensor],
    sharding: Mapping[str, Sharding],
    degrees: Degrees,
) -> dict[str, list[SavedBox]]:
    shapes = {(local.name, local.rank.pp, local.rank.ep, local.rank.tp): tuple(local.tensor.shape) for local in model}
    parts: dict[str, list[SavedBox]] = {}
    for rank, entry in entries:
        shape = shapes.get((entry.parameter, rank.pp, rank.ep, rank.tp))
        if shape is None:
            raise CheckpointError(f"the optimizer has state for {entry.parameter!r}, but the model of {rank} lacks it")
        for name, part in _place(entry, shape, rank, sharding, degrees):
            parts.setdefault(f"{OPTIMIZER_PREFIX}{name}/{entry.key}", []).append(part)
    return parts


def parameter_groups(states: Mapping[Rank, Any]) -> Any:
    """Return the hyperparameters of the first rank's groups, without parameter numbers.

    Raises:
        CheckpointError: the groups are not a list.
    """
    rank, state = next(iter(states.items()))
    groups = state.get("param_groups", [])
    if not isinstance(groups, list):
        raise CheckpointError(f"param_groups in the optimizer of {rank} is a {type(groups).__name__}, expected a list")
    return [
        {key: value for key, value in group.items() if key != "params"} for group in groups if isinstance(group, dict)
    ]


def _state_tensors(state: Any, names: Sequence[str], rank: Rank) -> Iterator[_StateTensor]:
    if not isinstance(state, dict):
        raise CheckpointError(f"the optimizer's state of {rank} is a {type(state).__name__}, expected a dict")
    is_zero1 = _ZERO1_STATE in state
    by_number = state.get(_ZERO1_STATE if is_zero1 else "state", {})
    masters = state.get(_ZERO1_MASTERS, {})
    if not all(isinstance(part, dict) for part in (by_number, masters, *getattr(by_number, "values", list)())):
        raise CheckpointError(f"the optimizer's state of {rank} is not a dict of dicts by parameter")
    for number, values in [*by_number.items(), *((number, {MASTER_KEY: it}) for number, it in masters.items())]:
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise CheckpointError(
                f"the optimizer of {rank} has a parameter {number!r}, but parameter_names has {len(names)} names for it"
            )
        for key, value in values.items():
            if not isinstance(value, torch.Tensor | int | float):
                raise CheckpointError(
                    f"{key!r} of {names[number]!r} in the optimizer of {rank} is a {type(value).__name__}, "
                    "expected a tensor or a number"
                )
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            check_storable(f"{key!r} of {names[number]!r} in the optimizer of {rank}", tensor)
            yield _StateTensor(names[number], str(key), tensor, is_row_shard=is_zero1 and tensor.ndim > 0)


def _place(
    entry: _StateTensor, shape: tuple[int, ...], rank: Rank, sharding: Mapping[str, Sharding], degrees: Degrees
) -> Iterator[tuple[str, SavedBox]]:
    """Yield the parts of an entry. Scalars such as step counts are copied to each whole tensor of a fused parameter."""
    tensor, local_shape = entry.tensor, tuple(entry.tensor.shape)
    found = placements_of(entry.parameter, shape, rank, sharding, degrees)
    if not local_shape:
        for name in {placement.name: None for placement in found}:
            yield name, SavedBox(rank, tensor, (), Box.whole(()))
        return
    held = Box.whole(local_shape)
    if entry.is_row_shard:
        held = Box((rank.dp * local_shape[0],) + (0,) * (len(shape) - 1), local_shape)
    if local_shape != shape and not (entry.is_row_shard and local_shape[1:] == shape[1:]):
        raise CheckpointError(
            f"{entry.key!r} of {entry.parameter!r} is {list(local_shape)} on {rank}, but the parameter is "
            f"{list(shape)}; are parameter_names in the optimizer's order?"
        )
    for placement in found:
        common = placement.local.intersect(held)
        if common is not None:
            begin = common.relative_to(placement.local).offsets
            offsets = tuple(a + b for a, b in zip(placement.offsets, begin, strict=True))
            part = tensor[common.relative_to(held).slices]
            yield placement.name, SavedBox(rank, part, placement.global_shape, Box(offsets, common.shape))
