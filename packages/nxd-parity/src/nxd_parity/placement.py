"""The place of a DTensor's local values in the whole tensor."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from nxd_parity.events import Placement, Runs


def local_part(value: Tensor) -> tuple[Tensor, Placement | None]:
    """Return a rank's values of a tensor, without communication, and their place; None if the tensor is not a DTensor.

    Local values of another shape than their placement says, such as padded ones, have no place either: it is inferred.
    """
    if not isinstance(value, DTensor):
        return value.detach(), None
    local = value.to_local().detach()
    at = value.device_mesh.get_coordinate()
    if at is None:
        return local, None
    runs: list[Runs] = [((0, size),) if size else () for size in value.shape]
    for placement, ranks, coordinate in zip(value.placements, value.device_mesh.shape, at, strict=True):
        dim = getattr(placement, "dim", None)  # of those that shard: strided ones are no `Shard` in every torch
        if dim is not None:
            runs[dim] = _shard(runs[dim], ranks, coordinate, getattr(placement, "split_factor", 1))
    if tuple(sum(count for _, count in it) for it in runs) != tuple(local.shape):
        return local, None
    start = tuple(it[0][0] if it else 0 for it in runs)
    is_box = all(len(it) <= 1 for it in runs)
    return local, Placement(tuple(value.shape), start, _ranks_to_add(value), () if is_box else tuple(runs))


def _shard(runs: Runs, ranks: int, index: int, split_factor: int) -> Runs:
    """Return a rank's shard of some positions; a strided one has a part of each of `split_factor` parts."""
    parts = [_chunk(_chunk(runs, split_factor, it), ranks, index) for it in range(split_factor)]
    joined: list[tuple[int, int]] = []
    for first, count in (run for part in parts for run in part):
        if joined and sum(joined[-1]) == first:
            joined[-1] = joined[-1][0], joined[-1][1] + count
        else:
            joined.append((first, count))
    return tuple(joined)


def _chunk(runs: Runs, chunks: int, index: int) -> Runs:
    """Return a chunk of some positions, as `torch.chunk` does: the last ones may be smaller, or empty."""
    size = -(-sum(count for _, count in runs) // chunks)
    return _part(runs, index * size, (index + 1) * size)


def _part(runs: Sequence[tuple[int, int]], start: int, stop: int) -> Runs:
    part, before = [], 0
    for first, count in runs:
        low, high = max(start - before, 0), min(stop - before, count)
        if low < high:
            part.append((first + low, high - low))
        before += count
    return tuple(part)


def _ranks_to_add(value: DTensor) -> tuple[int, ...]:
    """Return the ranks whose parts add up: those along the mesh dims where the tensor is partial."""
    mesh = value.device_mesh
    place = mesh.get_coordinate()
    if place is None or not any(it.is_partial() for it in value.placements):
        return ()
    index = tuple(slice(None) if it.is_partial() else at for it, at in zip(value.placements, place, strict=True))
    return tuple(mesh.mesh[index].flatten().tolist())
