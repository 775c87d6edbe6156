"""`load`: every rank fills the tensors that it gives, from whatever layout they were saved in.

All ranks check everything first and agree that it is well; only then is the first destination touched.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nxd_ckpt.catalog import find_tag
from nxd_ckpt.coordinator import Coordinator, coordinator_for, gather_from_every_rank, on_every_rank, on_rank_zero
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.reader import Checkpoint, TensorInfo, open_checkpoint
from nxd_ckpt.sharded_tensor import ShardedTensor, as_sharded_state
from nxd_ckpt.store import check_tag, root_folder

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class LoadedObjects:
    """What a checkpoint held besides tensors.

    Attributes:
        tag: the checkpoint's name.
        step: the step it was saved at, if that was given.
        world_size: how many ranks saved it.
        objects: what rank 0 gave to `save`.
        rank_objects: what the rank of this number gave; None if it gave nothing or there was no such rank.
    """

    tag: str
    step: int | None
    world_size: int
    objects: Any
    rank_objects: Any


def load(
    path: "str | os.PathLike[str]",
    tag: str | None = None,
    *,
    into: Mapping[str, ShardedTensor | torch.Tensor],
    strict: bool = True,
    process_group: "dist.ProcessGroup | Coordinator | None" = None,
) -> LoadedObjects:
    """Fills tensors in place from a checkpoint, each rank reading only the bytes that it needs. Called by all ranks.

    Args:
        path: the folder that was given to `save`.
        tag: which checkpoint; default: the newest complete one.
        into: what this rank wants of each logical tensor; the shards' memory is filled. Ranks may want different
            names and any boxes, whatever the layout was when saving.
        strict: the checkpoint must hold no tensor that no rank wants. Wanted tensors must be there in any case.
        process_group: the ranks; default: torch's default group if initialised, else this process alone.

    Raises:
        ValueError: the arguments of a rank are wrong or differ from the others'.
        CheckpointError: there is no such checkpoint, it does not fit `into` (one error lists all differences of
            name, shape and dtype), or files are missing, damaged or unreadable. All ranks raise, with the same text.
            Only an error while reading, after all checks, can leave destinations filled in part.
    """
    coordinator = coordinator_for(process_group)

    def check_arguments() -> dict[str, ShardedTensor]:
        root_folder(path)
        if tag is not None:
            check_tag(tag)
        return as_sharded_state(into)

    doing = "checking the arguments of load"
    wanted = on_every_rank(coordinator, doing, check_arguments, error_type=ValueError)
    _check_same_load(coordinator.all_gather_object((tag, strict)))
    root = root_folder(path)
    found = on_rank_zero(coordinator, f"loading from {root}", lambda: find_tag(root, tag))
    doing = f"loading checkpoint {found!r} from {root}"
    checkpoint = on_every_rank(coordinator, doing, lambda: open_checkpoint(root, found))
    _check_fit(coordinator, doing, checkpoint, wanted, strict=strict)
    shards = {name: tensor.shards for name, tensor in wanted.items()}
    transfers = on_every_rank(coordinator, doing, lambda: checkpoint.plan(shards))
    on_every_rank(coordinator, doing, lambda: checkpoint.fill(transfers))
    return LoadedObjects(
        tag=checkpoint.tag,
        step=checkpoint.step,
        world_size=checkpoint.world_size,
        objects=checkpoint.objects,
        rank_objects=checkpoint.rank_objects.get(coordinator.rank),
    )


def _check_same_load(asked: list[tuple[str | None, bool]]) -> None:
    for rank, found in enumerate(asked):
        if found != asked[0]:
            raise ValueError(
                f"ranks want different loads: (tag, strict) is {asked[0]} on rank 0 but {found} on rank {rank}"
            )


def _check_fit(
    coordinator: Coordinator, doing: str, checkpoint: Checkpoint, wanted: Mapping[str, ShardedTensor], *, strict: bool
) -> None:
    """Compares names, shapes and dtypes over all ranks; a name is unexpected only if no rank at all wants it."""
    views = gather_from_every_rank(
        coordinator, doing, lambda: (checkpoint.save_id, list(wanted), _differences(checkpoint.tensors, wanted))
    )
    if len({save_id for save_id, _, _ in views}) > 1:
        raise CheckpointError(f"{doing} failed: ranks found different saves under this tag; was it just overwritten?")
    ranks_of: dict[str, list[int]] = {}
    for rank, (_, _, differences) in enumerate(views):
        for difference in differences:
            ranks_of.setdefault(difference, []).append(rank)
    problems = [
        difference if len(ranks) == len(views) else f"{difference} (rank {', '.join(map(str, ranks))})"
        for difference, ranks in ranks_of.items()
    ]
    if strict:
        known = {name for _, names, _ in views for name in names}
        unexpected = [name for name in checkpoint.tensors if name not in known]
        problems.extend(f"{name!r} is in the checkpoint but not asked for" for name in unexpected)
        if unexpected:
            problems.append("(pass strict=False to leave out what is not asked for)")
    if problems:
        raise CheckpointError(f"{doing} failed: it does not fit what is asked for\n  " + "\n  ".join(problems))


def _differences(stored: Mapping[str, TensorInfo], wanted: Mapping[str, ShardedTensor]) -> list[str]:
    found = []
    for name, tensor in wanted.items():
        if name not in stored:
            found.append(f"{name!r} is asked for but not in the checkpoint")
            continue
        info = stored[name]
        if tensor.global_shape != info.global_shape:
            found.append(f"{name!r} has shape {list(info.global_shape)}, asked for {list(tensor.global_shape)}")
        if tensor.dtype != info.dtype:
            found.append(f"{name!r} is {info.dtype}, asked for {tensor.dtype}")
    return found
