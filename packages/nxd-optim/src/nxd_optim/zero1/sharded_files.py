"""The documented files of a ZeRO-1 optimizer: one per rank, in a folder, for the same layout only.

Written under temporary names that take their final ones when every rank has written, and read as plain data.
"""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nxd_state import active_group, all_gather_object

_SAVE_ID = "save_id"


def save(state: dict[str, Any], output_dir: str | os.PathLike[str], *, serially: bool) -> None:
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
            _on_every_rank(doing, (lambda: _write(state | {_SAVE_ID: save_id}, temporary)) if mine else None)
        _on_every_rank(doing, lambda: os.replace(temporary, path))
    finally:
        temporary.unlink(missing_ok=True)


def load(
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
        _on_every_rank(doing, (lambda: read.append(_read(path))) if turn == my_turn else None)
    if len(set(all_gather_object(read[0].pop(_SAVE_ID, None), _world()))) > 1:
        raise RuntimeError(
            f"{doing} failed: the files are of several saves, one of which did not end; use another folder"
        )
    _on_every_rank(doing, lambda: apply(read[0]))


def _path_of_rank(output_dir: str | os.PathLike[str]) -> Path:
    dp_rank, tp_rank, pp_rank = active_group("dp", "cp").rank, active_group("tp").rank, active_group("pp").rank
    return Path(output_dir) / "optim" / f"dp_rank_{dp_rank:02d}_tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt"


def _world() -> Any:
    return active_group("pp", "dp", "cp", "tp")


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


def _on_every_rank(doing: str, act: Callable[[], Any] | None) -> None:
    """Do this rank's part, if it has one now, and raise everywhere if that failed anywhere."""
    problem = None
    try:
        if act is not None:
            act()
    except Exception as error:  # handed to every rank, where it is raised
        problem = f"{type(error).__name__}: {error}"
    world = _world()
    problems = zip(world.ranks, all_gather_object(problem, world), strict=True)
    failed = [f"rank {rank}: {text}" for rank, text in problems if text is not None]
    if failed:
        raise RuntimeError(f"{doing} failed on {len(failed)} of {world.size} ranks\n  " + "\n  ".join(failed))
