"""Turns wanted boxes into reads of files: the bytes, their destination, their check, and the step after reading.

Verified, blocks that have a checksum are read as a whole, in pieces that fit into a processor's cache: there they are
hashed and copied before the next ones come. A piece that is wanted as a whole and lies together in the destination is
read straight into it. Unverified, only the wanted bytes are read, run by run. Either way the memory beside the
destinations is bounded.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from nxd_ckpt.boxes import Box, boxes_of_range
from nxd_ckpt.checksums import BlockCheck, blocks_with_hashes
from nxd_ckpt.dtypes import DTYPE_OF_CODE
from nxd_ckpt.files import PAGE_BYTES
from nxd_ckpt.manifest import Chunk
from nxd_ckpt.tensor_bytes import blocks_of, element_number, is_one_piece, memory_of, row_major_strides

_PIECE_BYTES = 2**21  # a multiple of all types' sizes


class Read(NamedTuple):
    """One stretch of a file.

    Attributes:
        offset: its first byte.
        memory: takes the bytes.
        check: of their block, if that has to be verified; takes all of it, in order.
        finish: to be called once the memory is filled and checked.
    """

    offset: int
    memory: memoryview
    check: BlockCheck | None
    finish: Callable[[], object] | None


class Transfer(NamedTuple):
    """A box of one chunk, counted from the chunk's first element, and the memory that it goes to.

    `dtype` is the safetensors name of what is stored; the destination's may differ and is then converted to. `alone` is
    whether no other transfer fills any of its memory, so that bytes may be verified where they are to stay.
    """

    chunk: Chunk
    dtype: str
    box: Box
    destination: torch.Tensor
    alone: bool = True


def with_overlaps(transfers: Sequence[Transfer]) -> list[Transfer]:
    """The same, of which those are not alone that share memory, as tied weights do; two columns of it look so, too."""
    spans = [(*_span(it.destination), number) for number, it in enumerate(transfers) if it.destination.is_cpu]
    found = list(transfers)
    reached, last = 0, 0  # the farthest end so far, and whose it is
    for start, end, number in sorted(spans):
        if start < min(end, reached):
            found[last], found[number] = (found[it]._replace(alone=False) for it in (last, number))
        if end > reached:
            reached, last = end, number
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first element, and of the end of the last one."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def reads_of_chunk(transfers: Sequence[Transfer], *, verify: bool) -> Iterator[Read]:
    """The reads that fill the destinations of all transfers from one chunk, by ascending offset within each transfer.

    Accelerators' destinations are filled on the CPU first, as a whole: cut up there they would cost a launch, or on XLA
    a compilation, per block.
    """
    on_cpu = [transfer for transfer in transfers if transfer.destination.is_cpu]
    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    for transfer in transfers:
        if not transfer.destination.is_cpu:
            staged = torch.empty(transfer.box.shape, dtype=DTYPE_OF_CODE[transfer.dtype], device="cpu")
            on_cpu.append(transfer._replace(destination=staged))
            late.append((transfer.destination, staged))
    yield from _verified_reads(on_cpu) if verify else _plain_reads(on_cpu)
    if late:
        yield Read(transfers[0].chunk.offset, memoryview(b""), None, lambda: [to.copy_(staged) for to, staged in late])


def reads_to_verify(offset: int, num_bytes: int, hashes: tuple[str, ...]) -> Iterator[Read]:
    """Reads bytes from `offset` on only to compare them with their checksums."""
    for first, end, expected in blocks_with_hashes(num_bytes, hashes):
        check = BlockCheck(offset + first, end - first, expected)
        for start, stop in _pieces(first, end):
            yield Read(offset + start, memoryview(bytearray(stop - start)), check, None)


def _pieces(first: int, end: int) -> list[tuple[int, int]]:
    return [(start, min(start + _PIECE_BYTES, end)) for start in range(first, end, _PIECE_BYTES)]


def _verified_reads(transfers: Sequence[Transfer]) -> Iterator[Read]:
    chunk, dtype = transfers[0].chunk, DTYPE_OF_CODE[transfers[0].dtype]
    everything = [(transfer, transfer.box) for transfer in transfers]
    for first, end, expected in blocks_with_hashes(chunk.num_bytes, chunk.hashes):
        of_block = _deliveries(everything, first // dtype.itemsize, end // dtype.itemsize)
        if not of_block:
            continue
        check = BlockCheck(chunk.offset + first, end - first, expected)
        for first_byte, end_byte in _pieces(first, end):
            start, stop = first_byte // dtype.itemsize, end_byte // dtype.itemsize
            direct = _direct_memory(transfers, dtype, start, stop)
            if direct is not None:
                yield Read(chunk.offset + first_byte, direct, check, None)
            else:
                piece = torch.empty(stop - start, dtype=dtype, device="cpu")
                deliver = partial(_deliver, piece, start, _deliveries(of_block, start, stop))
                yield Read(chunk.offset + first_byte, memory_of(piece), check, deliver)


def _direct_memory(transfers: Sequence[Transfer], dtype: torch.dtype, start: int, stop: int) -> memoryview | None:
    """The destination's memory for the elements from `start` to `stop` of the chunk, if they are one piece in both."""
    if len(transfers) != 1:
        return None
    (transfer,) = transfers
    shape, box, destination = transfer.chunk.box.shape, transfer.box, transfer.destination
    first = element_number(box.offsets, row_major_strides(shape))
    if (
        not transfer.alone
        or start < first
        or stop > first + box.num_elements
        or destination.dtype != dtype
        or not is_one_piece(destination)
    ):
        return None
    outer = next((dim for dim, size in enumerate(box.shape) if size > 1), len(shape))
    if box.shape[outer + 1 :] != shape[outer + 1 :]:
        return None
    return memory_of(destination)[(start - first) * dtype.itemsize : (stop - first) * dtype.itemsize]


def _deliveries(wanted: Sequence[tuple[Transfer, Box]], start: int, stop: int) -> list[tuple[Transfer, Box]]:
    """What of these boxes of a chunk lies among its elements from `start` to `stop`."""
    parts = list(boxes_of_range(wanted[0][0].chunk.box.shape, start, stop))
    return [(transfer, common) for transfer, box in wanted for part in parts if (common := part.intersect(box))]


def _deliver(piece: torch.Tensor, start: int, deliveries: Sequence[tuple[Transfer, Box]]) -> None:
    """Copies boxes of a chunk out of its elements from `start` on."""
    for transfer, common in deliveries:
        strides = row_major_strides(transfer.chunk.box.shape)
        source = piece.as_strided(common.shape, strides, element_number(common.offsets, strides) - start)
        transfer.destination[common.relative_to(transfer.box).slices()].copy_(source)


def _plain_reads(transfers: Sequence[Transfer]) -> Iterator[Read]:
    for transfer in transfers:
        dtype, strides = DTYPE_OF_CODE[transfer.dtype], row_major_strides(transfer.chunk.box.shape)
        first = element_number(transfer.box.offsets, strides)
        for block in blocks_of(transfer.box.shape, strides, dtype.itemsize):
            start = first + element_number(block.offsets, strides)
            offset = transfer.chunk.offset + start * dtype.itemsize
            yield from _reads_of_runs(offset, dtype, strides, transfer.destination[block.slices()])


def _reads_of_runs(
    offset: int, dtype: torch.dtype, strides: tuple[int, ...], destination: torch.Tensor
) -> Iterator[Read]:
    """Reads one block, whose first element lies at byte `offset`, run by run.

    A run is a stretch of the file that is read in one go: as many of the inner dimensions as lie together there, but
    for gaps of less than a page.
    """
    shape = tuple(destination.shape)
    run_length, wanted_in_run, num_outer_dims = 1, 1, len(shape)
    for dim in reversed(range(len(shape))):
        if shape[dim] > 1 and (strides[dim] - run_length) * dtype.itemsize >= PAGE_BYTES:
            break
        run_length += (shape[dim] - 1) * strides[dim]
        wanted_in_run *= shape[dim]
        num_outer_dims = dim
    for index in product(*map(range, shape[:num_outer_dims])):
        run_offset = offset + element_number(index, strides[:num_outer_dims]) * dtype.itemsize
        target = destination[index]
        if run_length == wanted_in_run and target.dtype == dtype and is_one_piece(target):
            yield Read(run_offset, memory_of(target), None, None)
        else:
            run = torch.empty(run_length, dtype=dtype, device="cpu")
            source = run.as_strided(shape[num_outer_dims:], strides[num_outer_dims:])
            yield Read(run_offset, memory_of(run), None, partial(target.copy_, source))
