"""ZeRO-1's part of `state_dict`, and its documented files: the states of this rank's part of each parameter.

They fit one rank of one layout. `sharded_state` is the form that fits every layout. The files, one per rank in a
folder, are written under temporary names that take their final ones when every rank has written, and read as plain
data.
"""

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from nxd_state import Group, active_group, all_gather_object, on_every_rank

from nxd_optim.zero1.buckets import Parts

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
