"""The states of the ZeRO-1 optimizer in the two forms in which they are saved.

As boxes of logical tensors, they load at any layout; names, files and filling the tensors are the caller's. As this
rank's part of `state_dict`, they fit one rank of one layout; its documented files, one per rank in a folder, are
written under temporary names that become final once every rank has written, and are read as plain data.
"""

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nxd_state import Box, Group, ShardSpec, active_group, all_gather_object, get_shard_spec, on_every_rank
from torch import Tensor

from nxd_optim.load_states import give_states, state_tensor
from nxd_optim.zero1.buckets import Parts
from nxd_optim.zero1.flat_bucket import OwnRange
from nxd_optim.zero1.logical_pieces import pieces_of_flat_range

MASTER_KEY = "master_weight"

StoredKeys = Callable[[Tensor], Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]


@dataclass(frozen=True, eq=False)
class StateShard:
    """One box of one state of a logical tensor.

    Attributes:
        name: of the logical tensor, as of the parameter's `ShardPiece`; "" is the parameter's own.
        logical_shape: shape of the whole logical tensor.
        box: the elements that this rank owns.
        tensor: their state, of the box's shape; shares memory with the optimizer.
    """

    name: str
    logical_shape: tuple[int, ...]
    box: Box
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class StateTensor:
    """One state of one parameter, of which this rank owns some elements.

    Attributes:
        parameter: the model's.
        key: such as "exp_avg", or "master_weight".
        shards: the elements owned, if the state has one value per element. Every element has one owner among the
            ranks that share states; padding of the parameter has none.
        scalar: the state, if it has one value for the parameter, such as "step". All its owners hold the same.
    """

    parameter: Tensor
    key: str
    shards: tuple[StateShard, ...] = ()
    scalar: Tensor | None = None


def logical_state(parts: Parts, *, with_masters: bool) -> list[StateTensor]:
    """All states of this rank.

    Raises:
        ValueError: a state is neither a tensor nor a number.
    """
    found = []
    for bucket, base in parts:
        for own in bucket.ranges:
            if with_masters and bucket.has_masters and not bucket.has_stale_master(own.parameter):
                found.append(StateTensor(own.parameter, MASTER_KEY, shards=_shards(own, own.weight.detach())))
            for key, value in base.state.get(own.weight, {}).items():
                tensor = state_tensor(value, key, f"a parameter of shape {tuple(own.parameter.shape)}")
                if tensor.shape == own.weight.shape:
                    found.append(StateTensor(own.parameter, key, shards=_shards(own, tensor)))
                else:
                    found.append(StateTensor(own.parameter, key, scalar=tensor))
    return found


def _shards(own: OwnRange, flat: Tensor) -> tuple[StateShard, ...]:
    return shards_of_range(own.parameter, own.start, own.stop, flat)


def allocate_state(parts: Parts, stored: StoredKeys, *, with_masters: bool) -> None:
    """Give every owned range zeros for the states that `stored` says there are of its parameter.

    Master weights that are not among them, or not wanted, are marked to be taken from the parameters.
    """
    for bucket, base in parts:
        bucket.mark_masters_stale(p for p in bucket.parameters if not (with_masters and MASTER_KEY in stored(p)))
        give_states(base, {own.weight: _zeros(own, stored(own.parameter)) for own in bucket.ranges})


def _zeros(own: OwnRange, stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """For each state; of a parameter that is a scalar, all have one element, as its range does."""
    is_scalar = not own.parameter.dim()
    return {
        key: torch.zeros_like(own.weight, dtype=dtype, requires_grad=False)
        if shape or is_scalar
        else torch.zeros((), dtype=dtype)
        for key, (dtype, shape) in stored.items()
        if key != MASTER_KEY
    }


def shards_of_range(parameter: Tensor, start: int, stop: int, flat: Tensor) -> tuple[StateShard, ...]:
    """The boxes of logical tensors that elements `start` to `stop` of a parameter, in C order, are in.

    Args:
        parameter: with its `ShardSpec`, if it has one.
        start: first element.
        stop: one past the last.
        flat: what there is for these elements, 1-d; the shards are views of it.
    """
    spec = get_shard_spec(parameter) or ShardSpec.whole(parameter.shape)
    pieces = pieces_of_flat_range(spec, start, stop)
    return tuple(StateShard(piece.name, piece.logical_shape, piece.logical, piece.view(flat)) for piece in pieces)


_SAVE_ID = "save_id"


def rank_state(parts: Parts, indices: Mapping[int, int], *, with_masters: bool) -> dict[str, Any]:
    """States, ranges and master weights by parameter index; tensors share memory with the optimizer.

    Args:
        parts: each bucket and its optimizer.
        indices: the index of each parameter, by id.
        with_masters: add "master_weights" where they are kept.
    """
    found: dict[str, Any] = {"state": {}, "ranges": {}}
    if with_masters:
        found["master_weights"] = {}
    for bucket, base in parts:
        for own in bucket.ranges:
            index = indices[id(own.parameter)]
            found["ranges"][index] = (own.start, own.stop, own.parameter.numel())
            if own.weight in base.state:
                found["state"][index] = dict(base.state[own.weight])
            if with_masters and bucket.has_masters:
                found["master_weights"][index] = own.weight.detach()
    return found


def check_rank_state(state_dict: Mapping[str, Any], parts: Parts, indices: Mapping[int, int]) -> None:
    """Raise a ValueError unless the states are of the very parts that this rank owns."""
    missing = {"state", "ranges", "param_groups"} - set(state_dict)
    if missing:
        raise ValueError(f"the state dict lacks {sorted(missing)}: it is not one of NeuronZero1Optimizer")
    expected = rank_state(parts, indices, with_masters=False)["ranges"]
    found = {index: tuple(ranges) for index, ranges in state_dict["ranges"].items()}
    for index in sorted(expected.keys() | found.keys()):
        if expected.get(index) != found.get(index):
            raise ValueError(
                f"the state dict is of another rank, layout or model: of parameter {index} it holds (start, stop, "
                f"size) {found.get(index)}, this rank owns {expected.get(index)}; checkpoints that load at any "
                "layout are made of sharded_state()"
            )


@torch.no_grad()
def load_rank_state(state_dict: Mapping[str, Any], parts: Parts, indices: Mapping[int, int]) -> None:
    """Take over states and master weights of what `check_rank_state` has found to fit."""
    for bucket, base in parts:
        own_by_weight = {own.weight: own for own in bucket.ranges}
        weights = [weight for group in base.param_groups for weight in group["params"]]
        states = {
            position: state_dict["state"][index]
            for position, weight in enumerate(weights)
            if (index := indices[id(own_by_weight[weight].parameter)]) in state_dict["state"]
        }
        base.load_state_dict({"state": states, "param_groups": base.state_dict()["param_groups"]})
        if bucket.has_masters:
            for own in bucket.ranges:
                master = state_dict.get("master_weights", {}).get(indices[id(own.parameter)])
                if master is not None:
                    own.weight.copy_(master)


def write_rank_file(state: dict[str, Any], output_dir: str | os.PathLike[str], *, serially: bool) -> None:
    """Write this rank's state; see `NeuronZero1Optimizer.save_sharded_state_dict`.

    Raises:
        RuntimeError: a rank could not write; all ranks raise, and files that were there before are untouched.
    """
    replicas = active_group("dp", "cp")
    path = _path_of_rank(output_dir)
    save_id: str = all_gather_object(uuid.uuid4().hex, _world())[0]
    temporary = path.with_name(f".{path.name}.{save_id}")
    doing = f"saving optimizer states to {output_dir}"
    try:
        for turn in range(replicas.size if serially else 1):
            mine = not serially or replicas.rank == turn
            act = (lambda: _write(state | {_SAVE_ID: save_id}, temporary)) if mine else _nothing
            on_every_rank(doing, act, _world())
        on_every_rank(doing, lambda: os.replace(temporary, path), _world())
    finally:
        temporary.unlink(missing_ok=True)


def read_rank_file(
    apply: Callable[[dict[str, Any]], None], output_dir: str | os.PathLike[str], num_workers_per_step: int
) -> None:
    """Read this rank's state and hand it to `apply`; see `NeuronZero1Optimizer.load_sharded_state_dict`.

    Raises:
        ValueError: `num_workers_per_step` is not positive.
        RuntimeError: a rank could not read or apply its file, or the files are of several saves; all ranks raise.
    """
    if num_workers_per_step < 1:
        raise ValueError(f"num_workers_per_step={num_workers_per_step} must be positive; the default is 8")
    path = _path_of_rank(output_dir)
    doing = f"loading optimizer states from {output_dir}"
    my_turn = int(os.environ.get("LOCAL_RANK", _world().rank)) // num_workers_per_step
    read: list[dict[str, Any]] = []
    for turn in range(max(all_gather_object(my_turn, _world())) + 1):
        on_every_rank(doing, (lambda: read.append(_read(path))) if turn == my_turn else _nothing, _world())
    if len(set(all_gather_object(read[0].pop(_SAVE_ID, None), _world()))) > 1:
        raise RuntimeError(
            f"{doing} failed: the files are of several saves, one of which did not end; use another folder"
        )
    on_every_rank(doing, lambda: apply(read[0]), _world())


def _path_of_rank(output_dir: str | os.PathLike[str]) -> Path:
    dp_rank, tp_rank, pp_rank = active_group("dp", "cp").rank, active_group("tp").rank, active_group("pp").rank
    return Path(output_dir) / "optim" / f"dp_rank_{dp_rank:02d}_tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt"


def _world() -> Group:
    return active_group("pp", "dp", "cp", "tp")


def _nothing() -> None:
    """What ranks do whose turn it is not."""


def _write(state: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        torch.save(_to_cpu(state), file)
        file.flush()
        os.fsync(file.fileno())


def _to_cpu(value: Any) -> Any:
    """Tensors on the CPU, each with only its own elements: a view would be saved with all of its bucket."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    return value


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
