"""Compares replicas: if several ranks hold the same box, only one writes it, and the other copies are never read.

Each of the other ranks hashes its copy, unless copies may differ, and compares it with the hash from the writer.
"""

from collections.abc import Container, Mapping, Sequence

from nxd_ckpt.boxes import Box
from nxd_ckpt.checksums import hashes_of
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.plan import SavePlan
from nxd_ckpt.safetensors_file import Hashes, in_file_order
from nxd_ckpt.sharded_tensor import ShardedTensor
from nxd_ckpt.tensor_bytes import tensor_parts

ReplicaHashes = Mapping[tuple[str, Box], tuple[str, ...]]
"""The hashes of this rank's copies of what other ranks write, by name and box."""


def hash_replicas(
    plan: SavePlan, state: Mapping[str, ShardedTensor], rank: int, may_differ: Container[str]
) -> ReplicaHashes:
    """Hash this rank's copies of the boxes that other ranks write, if copies must be equal."""
    found: dict[tuple[str, Box], tuple[str, ...]] = {}
    for writer, writes in enumerate(plan.writes):
        for write in writes if writer != rank else ():
            if write.name in may_differ:
                continue
            shards = state[write.name].shards if write.name in state else ()
            shard = next((shard for shard in shards if shard.box.contains(write.box)), None)
            if shard is not None:
                copy = shard.tensor[write.box.relative_to(shard.box).slices]
                found[write.name, write.box] = hashes_of(tensor_parts(copy))
    return found


def check_replicas(plan: SavePlan, own: ReplicaHashes, written: Sequence[Hashes]) -> None:
    """Compare this rank's copies with the written data.

    Raises:
        CheckpointError: a copy differs; names it and the rank that wrote it.
    """
    problems = [
        f"{write.name!r} {write.box} differs from the copy that rank {writer} wrote"
        for writer, (writes, hashes_of_file) in enumerate(zip(plan.writes, written, strict=True))
        for write, hashes in zip(in_file_order(writes, plan.tensors), hashes_of_file, strict=True)
        if own.get((write.name, write.box), hashes) != hashes
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"its {'; '.join(problems[:3])}{more}: the replicas are no longer equal; load an earlier checkpoint, or "
            "save with check_replicas=False"
        )
