"""Data files in the safetensors format: an 8-byte little-endian length, a JSON header of that length, the payload.

The safetensors library is not used, since it does not sync, stream or compute checksums. The positions of chunks in a
file follow from the list of writes, so the rank that writes the manifest need not ask the others.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.checksums import BlockHasher
from nxd_ckpt.plan import PlannedWrite, TensorDescription
from nxd_ckpt.tensor_bytes import DTYPE_OF_CODE, in_safetensors, tensor_parts

PAYLOAD_ALIGNMENT = 64

Hashes = list[tuple[str, ...]]


class PlacedWrite(NamedTuple):
    """One box of one tensor, and its position in a file."""

    name: str
    box: Box
    offset: int
    num_bytes: int


class FileLayout(NamedTuple):
    """One data file: a header, then the boxes of `placed` one after another without gaps."""

    header: bytes
    placed: tuple[PlacedWrite, ...]
    size: int


def in_file_order(writes: Iterable[PlannedWrite], tensors: Mapping[str, TensorDescription]) -> list[PlannedWrite]:
    """Return a rank's writes in the order of its file: large element sizes first."""
    return sorted(writes, key=lambda write: -DTYPE_OF_CODE[tensors[write.name].dtype].itemsize)


def lay_out(writes: Iterable[PlannedWrite], tensors: Mapping[str, TensorDescription]) -> FileLayout:
    """Place a rank's writes in its file. Large element sizes come first, so that every chunk is aligned to its own."""
    ordered = in_file_order(writes, tensors)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for write in ordered:
        tensor = tensors[write.name]
        dtype, shape = in_safetensors(tensor.dtype, write.box.shape)
        entries[stored_name(write.name, write.box, tensor.global_shape)] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [begin, begin + write.num_bytes],
        }
        begin += write.num_bytes
    header = as_header(entries)
    placed = []
    position = len(header)
    for write in ordered:
        placed.append(PlacedWrite(write.name, write.box, position, write.num_bytes))
        position += write.num_bytes
    return FileLayout(header, tuple(placed), position)


def as_header(entries: Mapping[str, object]) -> bytes:
    """Return the first bytes of a file, before its payload."""
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % PAYLOAD_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_parts(
    layout: FileLayout, tensor_of: Callable[[str, Box], torch.Tensor], hashes: Hashes
) -> "Iterator[bytes | memoryview]":
    """Yield the bytes of a file; each part is valid until the next is requested.

    Args:
        layout: the layout of the file.
        tensor_of: function that returns this rank's elements of a name and box.
        hashes: list that receives the hashes of each box, in the order of the file, after its bytes.
    """
    yield layout.header
    for write in layout.placed:
        hasher = BlockHasher()
        for part in tensor_parts(tensor_of(write.name, write.box)):
            hasher.update(part)
            yield part
        hashes.append(hasher.hashes())


def stored_name(name: str, box: Box, global_shape: tuple[int, ...]) -> str:
    """Return the name of a box in its file: the tensor's own if whole, otherwise followed by the box: `w[0:4,8:16]`."""
    return name if box.shape == global_shape else f"{name}{box}"
