"""Who writes which box, and which stored chunks a wanted box is read from.

Pure functions of plain descriptions: no tensors, no files, no torch.distributed. Every rank computes the same save plan
from the same gathered descriptions, and a thousand ranks can be planned for in one process.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nxd_ckpt.boxes import Box, subtract, uncovered
from nxd_ckpt.dtypes import DTYPE_OF_CODE
from nxd_ckpt.manifest import Chunk


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """What one rank says of one tensor: its safetensors dtype name, global shape, and the boxes held here."""

    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """One box of one tensor, to be written by one rank."""

    name: str
    box: Box
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """The elements `box` of a tensor, to be taken from `chunk`."""

    chunk: Chunk
    box: Box


@dataclass(frozen=True, slots=True)
class SavePlan:
    """All tensors of the checkpoint (their `boxes` are the distinct stored ones) and each rank's writes."""

    tensors: Mapping[str, TensorDescription]
    writes: Sequence[Sequence[PlannedWrite]]


def plan_save(descriptions: Sequence[Mapping[str, TensorDescription]]) -> SavePlan:
    """Gives every distinct box to one of its holders, so that all ranks write about the same number of bytes.

    Args:
        descriptions: what each rank holds, in rank order.

    Raises:
        ValueError: ranks disagree on a dtype or shape, or elements of a tensor are held by no rank; lists all of them.
    """
    tensors, problems = _merge(descriptions)
    for name, tensor in tensors.items():
        if name not in problems and (missing := uncovered(Box.whole(tensor.global_shape), tensor.boxes)):
            problems[name] = f"{name!r} {list(tensor.global_shape)}: no rank holds {_listed(missing)}"
    if problems:
        raise ValueError("the ranks' tensors do not fit together:\n  " + "\n  ".join(problems.values()))
    return SavePlan(tensors, _share_out(tensors, descriptions))


def plan_read(wanted: Box, chunks: Iterable[Chunk]) -> tuple[list[PlannedRead], list[Box]]:
    """Finds each wanted element in exactly one chunk; also returns the boxes that no chunk holds."""
    reads: list[PlannedRead] = []
    left = [wanted] if wanted.num_elements else []
    for chunk in chunks:
        if not left:
            break
        found = [common for piece in left if (common := piece.intersect(chunk.box))]
        if found:
            reads.extend(PlannedRead(chunk, box) for box in found)
            left = [rest for piece in left for rest in subtract(piece, chunk.box)]
    return reads, left


def _merge(
    descriptions: Sequence[Mapping[str, TensorDescription]],
) -> tuple[dict[str, TensorDescription], dict[str, str]]:
    """Each tensor with the distinct boxes of all ranks, and one problem per tensor on which the ranks disagree."""
    first: dict[str, tuple[int, TensorDescription]] = {}
    boxes: dict[str, set[Box]] = defaultdict(set)
    problems: dict[str, str] = {}
    for rank, description in enumerate(descriptions):
        for name, tensor in description.items():
            first_rank, expected = first.setdefault(name, (rank, tensor))
            if (tensor.dtype, tensor.global_shape) != (expected.dtype, expected.global_shape):
                problems.setdefault(
                    name,
                    f"{name!r} is {expected.dtype} {list(expected.global_shape)} on rank {first_rank} "
                    f"but {tensor.dtype} {list(tensor.global_shape)} on rank {rank}",
                )
            boxes[name].update(box for box in tensor.boxes if box.num_elements)
    merged = {
        name: TensorDescription(tensor.dtype, tensor.global_shape, tuple(sorted(boxes[name])))
        for name, (_, tensor) in first.items()
    }
    return merged, problems


def _share_out(
    tensors: Mapping[str, TensorDescription], descriptions: Sequence[Mapping[str, TensorDescription]]
) -> list[list[PlannedWrite]]:
    """Boxes with one holder leave no choice; of the others each goes, largest first, to the holder with least to do."""
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank, description in enumerate(descriptions):
        for name, tensor in description.items():
            for box in set(tensor.boxes):
                holders[name, box].append(rank)
    distinct = [
        PlannedWrite(name, box, box.num_elements * DTYPE_OF_CODE[tensor.dtype].itemsize)
        for name, tensor in tensors.items()
        for box in tensor.boxes
    ]
    distinct.sort(key=lambda write: (len(holders[write.name, write.box]) > 1, -write.num_bytes))
    writes: list[list[PlannedWrite]] = [[] for _ in descriptions]
    load = [0] * len(descriptions)
    for write in distinct:
        writer = min(holders[write.name, write.box], key=load.__getitem__)
        writes[writer].append(write)
        load[writer] += write.num_bytes
    return writes


def _listed(boxes: Sequence[Box]) -> str:
    more = f" and {len(boxes) - 3} more boxes" if len(boxes) > 3 else ""
    return ", ".join(map(str, boxes[:3])) + more
