"""Moves bytes between files and tensor memory, without a copy where the memory is one piece on the CPU.

Strided views go through a scratch block of at most `BLOCK_BYTES`, so that they need no second tensor of their size.
Tensors of accelerators pass through CPU memory one at a time, as a whole: cutting them up there would cost a launch, or
on XLA a compilation, per block.
"""

import ctypes
import math
import os
from collections.abc import Iterator
from itertools import product

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import write_fully

BLOCK_BYTES = 16 * 2**20

# Disks read whole pages, so skipping less than a page between two wanted runs saves nothing.
PAGE_BYTES = 4096


def write_tensor(fd: int, tensor: torch.Tensor) -> None:
    """Appends the elements in row-major order to the file."""
    tensor = tensor.detach().cpu()
    if _is_one_piece(tensor):
        write_fully(fd, _memory(tensor))
        return
    shape = tuple(tensor.shape)
    for block in _blocks(shape, _row_major_strides(shape), tensor.element_size()):
        scratch = tensor[block.slices()].resolve_conj().resolve_neg().contiguous()
        write_fully(fd, _memory(scratch))


def read_tensor(fd: int, position: int, stored_shape: tuple[int, ...], box: Box, destination: torch.Tensor) -> None:
    """Fills `destination` with one box of a stored array.

    Args:
        fd: the open file.
        position: byte at which the array begins.
        stored_shape: the array's shape; its elements lie in row-major order.
        box: the wanted elements, counted from the array's first one.
        destination: tensor of the box's shape, of any strides, on any device.

    Raises:
        CheckpointError: the file ended early.
    """
    destination = destination.detach()
    if destination.device.type != "cpu":
        on_cpu = torch.empty(box.shape, dtype=destination.dtype)
        read_tensor(fd, position, stored_shape, box, on_cpu)
        destination.copy_(on_cpu)
        return
    itemsize, strides = destination.element_size(), _row_major_strides(stored_shape)
    first_element = _element_number(box.offsets, strides)
    for block in _blocks(box.shape, strides, itemsize):
        start = first_element + _element_number(block.offsets, strides)
        _read_block(fd, position + start * itemsize, strides, destination[block.slices()])


def _blocks(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Cuts a box of a stored array into blocks that each span at most `BLOCK_BYTES` of it, in row-major order."""
    limit = max(1, BLOCK_BYTES // itemsize)
    steps = list(shape)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size * stride <= limit:
            break
        steps[dim] = max(1, limit // stride)
        if stride <= limit:
            break
    starts = [range(0, size, max(1, step)) for size, step in zip(shape, steps, strict=True)]
    for offsets in product(*starts):
        sizes = (min(step, size - start) for step, size, start in zip(steps, shape, offsets, strict=True))
        yield Box(offsets, tuple(sizes))


def _read_block(fd: int, position: int, strides: tuple[int, ...], destination: torch.Tensor) -> None:
    """Reads one block, whose first element lies at byte `position`, run by run.

    A run is a stretch of the file that is read in one go: as many of the inner dimensions as lie together there, but
    for gaps of less than a page.
    """
    shape, itemsize = tuple(destination.shape), destination.element_size()
    run_length, wanted_in_run, num_outer_dims = 1, 1, len(shape)
    for dim in reversed(range(len(shape))):
        if shape[dim] > 1 and (strides[dim] - run_length) * itemsize >= PAGE_BYTES:
            break
        run_length += (shape[dim] - 1) * strides[dim]
        wanted_in_run *= shape[dim]
        num_outer_dims = dim
    for index in product(*map(range, shape[:num_outer_dims])):
        run_position = position + _element_number(index, strides[:num_outer_dims]) * itemsize
        target = destination[index]
        if run_length == wanted_in_run and _is_one_piece(target):
            _read_fully(fd, run_position, target)
        else:
            run = torch.empty(run_length, dtype=target.dtype)
            _read_fully(fd, run_position, run)
            target.copy_(run.as_strided(shape[num_outer_dims:], strides[num_outer_dims:]))


def _element_number(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=True))


def _row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _is_one_piece(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are its memory, in row-major order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, valid as long as the tensor is."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read_fully(fd: int, position: int, tensor: torch.Tensor) -> None:
    left = _memory(tensor)
    while left:
        count = os.preadv(fd, [left], position)
        if count == 0:
            raise CheckpointError(f"the file ends at byte {position}, {len(left)} bytes early")
        left, position = left[count:], position + count
