"""`save`: describe, plan, write, commit, each step agreed on by all ranks before the next begins."""

import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.coordinator import Coordinator, coordinator_for, on_every_rank, on_rank_zero
from nxd_ckpt.dtypes import CODE_OF_DTYPE
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.manifest import Chunk, Manifest, TensorEntry, data_file_name, encode
from nxd_ckpt.objects import check_json
from nxd_ckpt.plan import SavePlan, TensorDescription, plan_save
from nxd_ckpt.safetensors_file import FileLayout, lay_out, write_file
from nxd_ckpt.sharded_tensor import ShardedTensor, as_sharded_state
from nxd_ckpt.store import StagedSave, check_sizes, check_tag, root_folder

if TYPE_CHECKING:
    import torch.distributed as dist

# A part of a tensor is stored under its name with its box behind; a name of that form could be taken for one.
_RESERVED_NAME = re.compile(r"|__metadata__|.*\[\d+:\d+(,\d+:\d+)*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Request:
    """What one rank asks for, as the others get to know it."""

    save_id: str
    tag: str
    step: int | None
    overwrite: bool
    tensors: dict[str, TensorDescription]
    objects: Any
    rank_objects: Any


def save(
    path: "str | os.PathLike[str]",
    tag: str,
    state: Mapping[str, ShardedTensor | torch.Tensor],
    *,
    objects: Any = None,
    rank_objects: Any = None,
    step: int | None = None,
    overwrite: bool = False,
    process_group: "dist.ProcessGroup | Coordinator | None" = None,
) -> None:
    """Writes a checkpoint; when it returns, the checkpoint is complete and on the disk. Called by all ranks.

    Boxes that several ranks hold alike are written once, the work spread over their holders. Tensors may change
    again when it has returned.

    Args:
        path: the folder for checkpoints, on a file system that all ranks share; made if missing.
        tag: name of this checkpoint, such as "step-1000".
        state: what this rank holds of each logical tensor; a plain tensor is a whole one. Ranks may hold different
            names, but together every element of every tensor.
        objects: small JSON-able things of the whole run; rank 0's count.
        rank_objects: small JSON-able things of this rank alone, such as its position in the data.
        step: number that orders the checkpoints of this folder.
        overwrite: replace a checkpoint of this tag; until the very end the old one stays valid.
        process_group: the ranks; default: torch's default group if initialised, else this process alone.

    Raises:
        ValueError: the arguments of a rank are wrong or do not fit the others'; nothing was written.
        CheckpointError: a rank could not write, or the tag is taken. All ranks raise, with the same text; a
            checkpoint that was there before is untouched.
    """
    coordinator = coordinator_for(process_group)

    def check_arguments() -> tuple[dict[str, ShardedTensor], _Request]:
        root_folder(path)
        sharded = as_sharded_state(state)
        check_json(objects, "objects")
        check_json(rank_objects, "rank_objects")
        request = _Request(
            save_id=uuid.uuid4().hex,
            tag=check_tag(tag),
            step=_check_step(step),
            overwrite=overwrite,
            tensors={_check_name(name): _describe(tensor) for name, tensor in sharded.items()},
            objects=objects if coordinator.rank == 0 else None,
            rank_objects=rank_objects,
        )
        return sharded, request

    doing = "checking the arguments of save"
    sharded, request = on_every_rank(coordinator, doing, check_arguments, error_type=ValueError)
    requests = coordinator.all_gather_object(request)
    _check_same_save(requests)
    plan = plan_save([request.tensors for request in requests])
    root, save_id = root_folder(path), requests[0].save_id
    staged = StagedSave(root, tag, save_id, overwrite=overwrite)
    doing = f"saving checkpoint {tag!r} to {root}"
    try:
        on_rank_zero(coordinator, doing, staged.begin)
        on_every_rank(coordinator, doing, lambda: _write(staged, save_id, coordinator.rank, plan, sharded))
        on_rank_zero(coordinator, doing, lambda: _commit(staged, plan, requests))
    finally:
        staged.end()


def _check_step(step: int | None) -> int | None:
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"step={step!r} is not a number of steps; pass an int of 0 or more, or None")
    return step


def _check_name(name: str) -> str:
    if not isinstance(name, str) or _RESERVED_NAME.fullmatch(name):
        raise ValueError(f"the name {name!r} is not allowed: empty, '__metadata__' or ending in a box like [0:4]")
    return name


def _describe(tensor: ShardedTensor) -> TensorDescription:
    boxes = tuple(shard.box for shard in tensor.shards)
    return TensorDescription(CODE_OF_DTYPE[tensor.dtype], tensor.global_shape, boxes)


def _check_same_save(requests: list[_Request]) -> None:
    expected = (requests[0].tag, requests[0].step, requests[0].overwrite)
    for rank, request in enumerate(requests):
        found = (request.tag, request.step, request.overwrite)
        if found != expected:
            raise ValueError(
                f"ranks want different saves: (tag, step, overwrite) is {expected} on rank 0 but {found} on rank {rank}"
            )


def _file_layout(plan: SavePlan, save_id: str, rank: int) -> FileLayout | None:
    """The data file of a rank, None if it has nothing to write."""
    writes = plan.writes[rank]
    return lay_out(data_file_name(save_id, rank), writes, plan.tensors) if writes else None


def _write(staged: StagedSave, save_id: str, rank: int, plan: SavePlan, state: Mapping[str, ShardedTensor]) -> None:
    layout = _file_layout(plan, save_id, rank)
    if layout is None:
        return
    path = staged.data_path(data_file_name(save_id, rank))
    if not os.path.isdir(os.path.dirname(path)):
        raise CheckpointError(
            f"{os.path.dirname(path)} is not here, though rank 0 made it; path must lie on a file system that all "
            "ranks share"
        )

    def shard_of(name: str, box: Box) -> torch.Tensor:
        return next(shard.tensor for shard in state[name].shards if shard.box == box)

    write_file(path, layout, shard_of)


def _commit(staged: StagedSave, plan: SavePlan, requests: list[_Request]) -> None:
    save_id = requests[0].save_id
    files: dict[str, int] = {}
    chunks: dict[str, list[Chunk]] = {name: [] for name in plan.tensors}
    for rank in range(len(requests)):
        layout = _file_layout(plan, save_id, rank)
        if layout is not None:
            files[data_file_name(save_id, rank)] = layout.size
            for name, chunk in layout.chunks:
                chunks[name].append(chunk)
    check_sizes((staged.data_path(file), size) for file, size in files.items())
    manifest = Manifest(
        save_id=save_id,
        step=requests[0].step,
        committed_at=time.time(),
        world_size=len(requests),
        files=files,
        tensors={
            name: TensorEntry(tensor.dtype, tensor.global_shape, tuple(chunks[name]))
            for name, tensor in plan.tensors.items()
        },
        objects=requests[0].objects,
        rank_objects={
            rank: request.rank_objects for rank, request in enumerate(requests) if request.rank_objects is not None
        },
    )
    staged.commit(encode(manifest))
