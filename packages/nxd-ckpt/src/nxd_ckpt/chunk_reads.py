"""Plans the reads that fill wanted boxes: the bytes, their destination, their check, and the step after reading.

To verify, blocks with a checksum are read as a whole, in pieces that fit into a processor's cache, where they are
hashed and copied. A piece that is wanted as a whole and contiguous in the destination is read directly into it. Without
verification, only the wanted bytes are read, run by run. In both cases the extra memory is bounded.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from nxd_ckpt.boxes import Box, boxes_of_range
from nxd_ckpt.checksums import BlockCheck, blocks_with_hashes
from nxd_ckpt.files import PAGE_BYTES
from nxd_ckpt.manifest import Chunk
from nxd_ckpt.tensor_bytes import DTYPE_OF_CODE, blocks_of, flat_index, is_one_piece, memory_of, row_major_strides

_PIECE_BYTES = 2**21  # a multiple of all types' sizes


class Read(NamedTuple):
    """A read of consecutive bytes of a file.

    Attributes:
        offset: the index of the first byte.
        memory: the memory to fill.
        check: the check of the block, if it has to be verified; it receives all bytes of the block, in order.
        finish: function to call when the memory is filled and checked.
    """

    offset: int
    memory: memoryview
    check: BlockCheck | None
    finish: Callable[[], object] | None


class Transfer(NamedTuple):
    """A box of one chunk and its destination.

    Attributes:
        chunk: the stored chunk.
        dtype: the stored dtype's name in safetensors; elements are converted if the destination has another.
        box: the box, counted from the chunk's first element.
        destination: the tensor to fill.
        alone: whether no other transfer fills any of its memory, so that bytes can be verified in place.
    """

    chunk: Chunk
    dtype: str
    box: Box
    destination: torch.Tensor
    alone: bool = True


def with_overlaps(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Return the transfers, with `alone` unset where memory spans overlap: tied weights, or columns of one tensor."""
    spans = [(*_span(it.destination), number) for number, it in enumerate(transfers) if it.destination.is_cpu]
    found = list(transfers)
    reached, last = 0, 0  # the farthest end so far, and its transfer
    for start, end, number in sorted(spans):
        if start < min(end, reached):
            found[last], found[number] = (found[it]._replace(alone=False) for it in (last, number))
        if end > reached:
            reached, last = end, number
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first element, and of the end of the last one."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def reads_of_chunk(transfers: Sequence[Transfer], *, verify: bool) -> Iterator[Read]:
    """Yield the reads that fill all destinations from one chunk, by ascending offset within each transfer.

    Destinations on accelerators are filled on the CPU first, and copied as a whole: block by block, each would cost a
    launch, or on XLA a compilation.
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
    """Yield reads that only compare the bytes from `offset` on with their checksums."""
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
        of_block = _boxes_in_range(everything, first // dtype.itemsize, end // dtype.itemsize)
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
                deliver = partial(_copy_boxes, piece, start, _boxes_in_range(of_block, start, stop))
                yield Read(chunk.offset + first_byte, memory_of(piece), check, deliver)


def _direct_memory(transfers: Sequence[Transfer], dtype: torch.dtype, start: int, stop: int) -> memoryview | None:
    """Return the destination's memory for elements `start` to `stop` of the chunk, if contiguous in both; else None."""
    if len(transfers) != 1:
        return None
    (transfer,) = transfers
    shape, box, destination = transfer.chunk.box.shape, transfer.box, transfer.destination
    first = flat_index(box.offsets, row_major_strides(shape))
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


def _boxes_in_range(wanted: Sequence[tuple[Transfer, Box]], start: int, stop: int) -> list[tuple[Transfer, Box]]:
    """Return the parts of these boxes of a chunk that are among its elements `start` to `stop`."""
    parts = list(boxes_of_range(wanted[0][0].chunk.box.shape, start, stop))
    return [(transfer, common) for transfer, box in wanted for part in parts if (common := part.intersect(box))]


def _copy_boxes(piece: torch.Tensor, start: int, deliveries: Sequence[tuple[Transfer, Box]]) -> None:
    """Copy boxes of a chunk from a piece that begins at its element `start`."""
    for transfer, common in deliveries:
        strides = row_major_strides(transfer.chunk.box.shape)
        source = piece.as_strided(common.shape, strides, flat_index(common.offsets, strides) - start)
        transfer.destination[common.relative_to(transfer.box).slices].copy_(source)


def _plain_reads(transfers: Sequence[Transfer]) -> Iterator[Read]:
    for transfer in transfers:
        dtype, strides = DTYPE_OF_CODE[transfer.dtype], row_major_strides(transfer.chunk.box.shape)
        first = flat_index(transfer.box.offsets, strides)
        for block in blocks_of(transfer.box.shape, strides, dtype.itemsize):
            start = first + flat_index(block.offsets, strides)
            offset = transfer.chunk.offset + start * dtype.itemsize
            yield from _reads_of_runs(offset, dtype, strides, transfer.destination[block.slices])


def _reads_of_runs(
    offset: int, dtype: torch.dtype, strides: tuple[int, ...], destination: torch.Tensor
) -> Iterator[Read]:
    """Yield the reads of one block, whose first element is at byte `offset`, run by run.

    A run is read at once. It covers as many of the inner dimensions as are contiguous in the file, except for gaps of
    less than a page.
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
        run_offset = offset + flat_index(index, strides[:num_outer_dims]) * dtype.itemsize
        target = destination[index]
        if run_length == wanted_in_run and target.dtype == dtype and is_one_piece(target):
            yield Read(run_offset, memory_of(target), None, None)
        else:
            run = torch.empty(run_length, dtype=dtype, device="cpu")
            source = run.as_strided(shape[num_outer_dims:], strides[num_outer_dims:])
            yield Read(run_offset, memory_of(run), None, partial(target.copy_, source))
