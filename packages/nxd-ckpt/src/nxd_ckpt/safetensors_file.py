"""Data files in the safetensors format: an 8-byte little-endian length, a JSON header of that length, the payload.

Written here rather than by the safetensors library, which neither fsyncs nor streams. Where a chunk lies in its file
follows from the list of writes alone, so the rank that writes the manifest need not ask the others.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.dtypes import DTYPE_OF_CODE
from nxd_ckpt.files import new_file, write_fully
from nxd_ckpt.manifest import Chunk
from nxd_ckpt.plan import PlannedWrite, TensorDescription
from nxd_ckpt.tensor_bytes import write_tensor

PAYLOAD_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One data file: its first bytes, then the chunks of `chunks` one after another without holes."""

    header: bytes
    chunks: tuple[tuple[str, Chunk], ...]
    size: int


def lay_out(file: str, writes: Iterable[PlannedWrite], tensors: Mapping[str, TensorDescription]) -> FileLayout:
    """Places one rank's writes in its file. Large element sizes come first, so that every chunk is aligned to its own.

    Args:
        file: the file's name.
        writes: what the rank writes.
        tensors: dtype and global shape of every tensor.
    """
    ordered = sorted(writes, key=lambda write: -DTYPE_OF_CODE[tensors[write.name].dtype].itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for write in ordered:
        entries[_key(write, tensors)] = {
            "dtype": tensors[write.name].dtype,
            "shape": write.box.shape,
            "data_offsets": [begin, begin + write.num_bytes],
        }
        begin += write.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % PAYLOAD_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    chunks = []
    position = len(header)
    for write in ordered:
        chunks.append((write.name, Chunk(file, _key(write, tensors), position, write.num_bytes, write.box)))
        position += write.num_bytes
    return FileLayout(header, tuple(chunks), position)


def write_file(path: str, layout: FileLayout, shard_of: Callable[[str, Box], torch.Tensor]) -> None:
    """Creates the file and returns when it is on the disk.

    Args:
        path: where; must not exist.
        layout: what.
        shard_of: finds this rank's tensor of a name and box.
    """
    with new_file(path) as fd:
        write_fully(fd, layout.header)
        for name, chunk in layout.chunks:
            write_tensor(fd, shard_of(name, chunk.box))


def _key(write: PlannedWrite, tensors: Mapping[str, TensorDescription]) -> str:
    """A whole tensor keeps its name; a part has its box behind it, as in `weight[0:4,8:16]`."""
    whole = write.box.shape == tensors[write.name].global_shape
    return write.name if whole else f"{write.name}{write.box}"
