"""Writes any source as a checkpoint of this package without holding it in memory.

`save` needs all tensors at once. Tensors of mapped files are passed unchanged. The others, and those whose dtype
changes, are first copied to a temporary file next to the checkpoints, whose pages the system writes back and drops.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.coordinator import ThisProcess
from nxd_ckpt.interop.remote import is_remote
from nxd_ckpt.interop.source import Progress, TensorSource, converted, fill, ignore_progress, num_bytes
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.saving import save
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor

_ALIGNMENT = 64


def save_source(
    source: TensorSource,
    path: "str | os.PathLike[str]",
    tag: str,
    *,
    dtype: torch.dtype | None = None,
    step: int | None = None,
    overwrite: bool = False,
    extra: Mapping[str, bytes] | None = None,
    progress: Progress = ignore_progress,
) -> None:
    """Writes a source as the checkpoint `tag`, with `source.objects` as its objects. Call it in one process.

    Memory: one part of one tensor. Disk, besides the result: temporarily the same size again, unless the source is
    mapped (Hugging Face, NeuronX) and keeps its dtype.

    Args:
        source: the tensors to write.
        path: as for `save`.
        tag: as for `save`.
        dtype: dtype to convert floating-point tensors to; default: as stored.
        step: as for `save`.
        overwrite: as for `save`.
        extra: as for `save`.
        progress: called after each tensor has been read.

    Raises:
        ValueError: a name or the tag is not allowed.
        CheckpointError: the source cannot be read, or the tag is taken.
    """
    targets = {
        name: TensorInfo(converted(info.dtype, dtype), info.global_shape) for name, info in source.tensors.items()
    }
    through_scratch = {
        name: info for name, info in targets.items() if not source.is_mapped or info.dtype != source.tensors[name].dtype
    }
    with _scratch_tensors(path, through_scratch) as scratch:
        state: dict[str, ShardedTensor | torch.Tensor] = {}
        for name, info in targets.items():
            if name in scratch:
                fill(source, name, Box.whole(info.global_shape), scratch[name])
                state[name] = scratch[name]
            else:
                found = source.shards(name, Box.whole(info.global_shape))
                shards = [Shard(shard.tensor.detach(), shard.offsets) for shard in found]
                state[name] = ShardedTensor(info.global_shape, shards, info.dtype)
            progress(name, num_bytes(info))
        save(
            path,
            tag,
            state,
            objects=source.objects,
            step=step,
            overwrite=overwrite,
            extra=extra,
            process_group=ThisProcess(),
        )


@contextmanager
def _scratch_tensors(
    path: "str | os.PathLike[str]", infos: Mapping[str, TensorInfo]
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield tensors backed by an unnamed temporary file, which disappears with the process at the latest."""
    begins: dict[str, int] = {}
    size = 0
    for name, info in infos.items():
        begins[name] = size
        size += -(-num_bytes(info) // _ALIGNMENT) * _ALIGNMENT
    if not size:
        yield {name: torch.empty(info.global_shape, dtype=info.dtype, device="cpu") for name, info in infos.items()}
        return
    with tempfile.TemporaryFile(dir=_scratch_folder(os.fspath(path))) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises an error here instead of a SIGBUS later
        memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        yield {
            name: memory[begins[name] : begins[name] + num_bytes(info)].view(info.dtype).reshape(info.global_shape)
            for name, info in infos.items()
        }


def _scratch_folder(path: str) -> str | None:
    """Return a folder on the checkpoints' disk, which has space for them; temporary folders may be in memory."""
    if is_remote(path):
        return None
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
