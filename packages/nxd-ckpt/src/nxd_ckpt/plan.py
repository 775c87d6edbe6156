"""Plans which rank writes which box, and from which stored chunks a requested box is read.

Pure functions of plain descriptions: no tensors, no files, no torch.distributed. Every rank computes the same save plan
from the same gathered descriptions, and one process can plan for a thousand ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nxd_ckpt.boxes import Box, gc_paused, subtract, uncovered
from nxd_ckpt.checksums import BLOCK_BYTES
from nxd_ckpt.manifest import Chunk
from nxd_ckpt.tensor_bytes import DTYPE_OF_CODE


class TensorDescription(NamedTuple):
    """One rank's description of one tensor.

    Attributes:
        dtype: its name in safetensors.
        global_shape: the shape of the whole tensor.
        boxes: the boxes that this rank holds.
        of_first_holder: whether the first rank that holds a box writes it, so that related tensors, such as batch
            statistics, come from one rank if replicas differ.
    """

    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    of_first_holder: bool = False


class PlannedWrite(NamedTuple):
    """One box of one tensor, to be written by one rank."""

    name: str
    box: Box
    num_bytes: int


class PlannedRead(NamedTuple):
    """The elements `box` of a tensor, to be taken from `chunk`."""

    chunk: Chunk
    box: Box


@dataclass(frozen=True, slots=True)
class SavePlan:
    """All tensors of the checkpoint (their `boxes` are the distinct stored ones) and each rank's writes."""

    tensors: Mapping[str, TensorDescription]
    writes: Sequence[Sequence[PlannedWrite]]


def plan_save(
    descriptions: Sequence[Mapping[str, TensorDescription]], *, max_write_bytes: int | None = None
) -> SavePlan:
    """Assign every distinct box to one of its holders, so that all ranks write about the same number of bytes.

    Boxes held by several ranks and larger than a block are split, so that all holders can help.

    Args:
        descriptions: the tensors that each rank holds, in rank order.
        max_write_bytes: split writes into slabs of at most this size; single rows may be larger.

    Raises:
        ValueError: ranks disagree on a dtype or shape, or elements of a tensor are held by no rank; lists all of them.
    """
    with gc_paused():
        held, problems = _gather_holders(descriptions)
        for name, tensor in held.items():
            if name not in problems and (missing := uncovered(Box.whole(tensor.global_shape), tensor.holders)):
                problems[name] = f"{name!r} {list(tensor.global_shape)}: no rank holds {_listed(missing)}"
        if problems:
            raise ValueError("the ranks' tensors do not fit together:\n  " + "\n  ".join(problems.values()))
        plan = _assign_writers(held, len(descriptions))
        return plan if max_write_bytes is None else _cut(plan, max_write_bytes)


def plan_read(wanted: Box, chunks: Iterable[Chunk]) -> tuple[list[PlannedRead], list[Box]]:
    """Find each requested element in exactly one chunk; also returns the boxes that no chunk holds."""
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


class _HeldTensor(NamedTuple):
    """A tensor as the first rank that has it describes it, and the ranks that hold each distinct box."""

    dtype: str
    global_shape: tuple[int, ...]
    first_rank: int
    holders: dict[Box, list[int]]
    of_first_holder: bool


def _gather_holders(
    descriptions: Sequence[Mapping[str, TensorDescription]],
) -> tuple[dict[str, _HeldTensor], dict[str, str]]:
    """Return every tensor with its boxes sorted, and one problem per tensor on which the ranks disagree."""
    held: dict[str, _HeldTensor] = {}
    problems: dict[str, str] = {}
    for rank, description in enumerate(descriptions):
        for name, (dtype, global_shape, boxes, of_first_holder) in description.items():
            tensor = held.get(name)
            if tensor is None:
                tensor = held[name] = _HeldTensor(dtype, global_shape, rank, {}, of_first_holder)
            elif (dtype, global_shape) != (tensor.dtype, tensor.global_shape):
                problems.setdefault(
                    name,
                    f"{name!r} is {tensor.dtype} {list(tensor.global_shape)} on rank {tensor.first_rank} "
                    f"but {dtype} {list(global_shape)} on rank {rank}",
                )
            for box in boxes if len(boxes) < 2 else set(boxes):
                tensor.holders.setdefault(box, []).append(rank)
    sorted_boxes = {
        name: tensor._replace(holders={box: tensor.holders[box] for box in sorted(tensor.holders) if box.num_elements})
        for name, tensor in held.items()
    }
    return sorted_boxes, problems


def _assign_writers(tensors: Mapping[str, _HeldTensor], world_size: int) -> SavePlan:
    """Assign boxes to writers.

    Boxes with a single holder, or for the first holder, are fixed. Each of the others goes, largest first, to the
    holder with the least to write.
    """
    shared: list[tuple[PlannedWrite, list[int]]] = []
    writes: list[list[PlannedWrite]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for name, tensor in tensors.items():
        itemsize = DTYPE_OF_CODE[tensor.dtype].itemsize
        for box, holders in tensor.holders.items():
            num_bytes = box.num_elements * itemsize
            if len(holders) == 1 or tensor.of_first_holder:
                writes[holders[0]].append(PlannedWrite(name, box, num_bytes))
                load[holders[0]] += num_bytes
            else:
                for part in _split(box, itemsize, len(holders)):
                    shared.append((PlannedWrite(name, part, part.num_elements * itemsize), holders))
    shared.sort(key=lambda item: -item[0].num_bytes)
    for write, holders in shared:
        writer = min(holders, key=load.__getitem__)
        writes[writer].append(write)
        load[writer] += write.num_bytes
    planned = {
        name: TensorDescription(tensor.dtype, tensor.global_shape, tuple(tensor.holders), tensor.of_first_holder)
        for name, tensor in tensors.items()
    }
    return SavePlan(planned, writes)


def _cut(plan: SavePlan, max_write_bytes: int) -> SavePlan:
    writes = [
        [
            PlannedWrite(write.name, part, part.num_elements * DTYPE_OF_CODE[plan.tensors[write.name].dtype].itemsize)
            for write in of_rank
            for part in _slabs(write.box, -(-write.num_bytes // max_write_bytes))
        ]
        for of_rank in plan.writes
    ]
    return SavePlan(plan.tensors, writes)


def _split(box: Box, itemsize: int, num_holders: int) -> Iterator[Box]:
    """Slabs of a box: at most one per holder, and none smaller than a block."""
    return _slabs(box, min(num_holders, box.num_elements * itemsize // BLOCK_BYTES))


def _slabs(box: Box, parts: int) -> Iterator[Box]:
    """Split a box along its outermost dimension into `parts` slabs, each contiguous in memory; fewer if the dimension
    is too short.
    """
    outermost = next((dim for dim, size in enumerate(box.shape) if size > 1), 0)
    length = box.shape[outermost] if box.shape else 1
    parts = max(1, min(parts, length))
    if parts == 1:
        yield box
        return
    for part in range(parts):
        start, end = length * part // parts, length * (part + 1) // parts
        yield Box(
            (*box.offsets[:outermost], box.offsets[outermost] + start, *box.offsets[outermost + 1 :]),
            (*box.shape[:outermost], end - start, *box.shape[outermost + 1 :]),
        )


def _listed(boxes: Sequence[Box]) -> str:
    more = f" and {len(boxes) - 3} more boxes" if len(boxes) > 3 else ""
    return ", ".join(map(str, boxes[:3])) + more
