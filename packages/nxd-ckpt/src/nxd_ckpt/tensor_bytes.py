"""The dtypes that a checkpoint can hold, and tensor memory as bytes, without a copy if contiguous on the CPU.

Scales and pairs of 4-bit numbers are never converted to another dtype. An element of "F4" is such a pair, as in torch.

Strided views are split into blocks of at most `SCRATCH_BYTES`, so that they need no second tensor of their size.
Tensors of accelerators are copied to the CPU one at a time, as a whole: splitting them on the device would cost a
launch, or on XLA a compilation, per block.
"""

import ctypes
import math
from collections.abc import Iterator
from itertools import product

import torch

from nxd_ckpt.boxes import Box

# Names of dtypes in the safetensors format; "C128" is our own.
CODE_OF_DTYPE: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.complex128: "C128",
}

CODE_OF_DTYPE[torch.float8_e8m0fnu] = "F8_E8M0"
if torch.__version__ >= "2.10":  # torch 2.9 has the name, and cannot copy such a tensor
    CODE_OF_DTYPE[torch.float4_e2m1fn_x2] = "F4"


DTYPE_OF_CODE: dict[str, torch.dtype] = {code: dtype for dtype, code in CODE_OF_DTYPE.items()}
OPAQUE = frozenset({"F8_E8M0", "F4"})


def in_safetensors(code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape for the header of a safetensors file, which counts the numbers in a pair."""
    if code == "C128":
        return "F64", (*shape, 2)
    if code == "F4":
        return (code, (*shape[:-1], 2 * shape[-1])) if shape else ("U8", shape)
    return code, shape


SCRATCH_BYTES = 16 * 2**20

# Bytes hashed and written at a time: they are still in the processor's cache when written.
PART_BYTES = 2**20


def tensor_parts(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order; each part is valid until the next is requested."""
    tensor = tensor.detach().cpu()
    if is_one_piece(tensor):
        whole = memory_of(tensor)
        for start in range(0, len(whole), PART_BYTES):
            yield whole[start : start + PART_BYTES]
        return
    shape = tuple(tensor.shape)
    for block in blocks_of(shape, row_major_strides(shape), tensor.element_size()):
        scratch = tensor[block.slices].resolve_conj().resolve_neg().contiguous()
        yield memory_of(scratch)


def blocks_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Yield the blocks of a box of a row-major array, in order; each spans at most `SCRATCH_BYTES` of the array.

    Args:
        shape: the shape of the box.
        strides: the strides of the array, in elements.
        itemsize: bytes per element.
    """
    limit = max(1, SCRATCH_BYTES // itemsize)
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


def pieces_of(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield views of at most `limit` bytes that make up a tensor in row-major order."""
    if tensor.nbytes <= limit:
        yield tensor
        return
    rows = limit // (tensor.nbytes // tensor.shape[0])
    if rows:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from pieces_of(row, limit)


def flat_index(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the position of an element among all elements of an array."""
    return sum(i * stride for i, stride in zip(index, strides, strict=True))


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous row-major array."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_one_piece(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values in row-major order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_non_overlapping(tensor: torch.Tensor) -> bool:
    """Whether each element has its own memory, judging by nested strides: it is no expanded or unfolded view."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    reach = 0  # of the dimensions so far, in elements
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory._tensor = tensor  # type: ignore[attr-defined]  # the view keeps its tensor alive
    return memoryview(memory).cast("B")
