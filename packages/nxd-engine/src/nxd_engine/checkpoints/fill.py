"""Compares a checkpoint's tensors with those of a model, by name, shape and value, and fills the model's."""

import ctypes
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping

import torch
from nxd_ckpt import CheckpointError, Coordinator, Shard
from nxd_ckpt.boxes import Box, uncovered
from nxd_ckpt.interop import TensorSource
from nxd_ckpt.interop.source import fill
from nxd_ckpt.sharded_tensor import as_sharded
from torch import Tensor

from nxd_engine.checkpoints.state import CheckpointState, kind_of

_SHOWN_NAMES = 8
_BLOCK_BYTES = 16 * 2**20


def check_names(
    stored: Iterable[str],
    wanted: Iterable[str],
    ignored: Iterable[str],
    what: str,
    coordinator: Coordinator,
    *,
    can_be_lax: bool = True,
) -> None:
    """Compare the model in a checkpoint with the one that the ranks want to fill, by names. Called by all ranks.

    Args:
        stored: names in the checkpoint, of any kind.
        wanted: names of the model's tensors on this rank.
        ignored: names that may be stored even if no rank wants them.
        what: the checkpoint, for the message.
        coordinator: the coordinator of the ranks.
        can_be_lax: whether the caller accepts `strict=False`.

    Raises:
        CheckpointError: a name is missing, or no rank wants it; the same text on all ranks.
    """
    of_all_ranks = coordinator.all_gather_object((sorted(wanted), sorted(ignored)))
    wanted_names = {name for names, _ in of_all_ranks for name in names}
    known = wanted_names | {name for _, names in of_all_ranks for name in names}
    stored_names = {name for name in stored if kind_of(name) == "model"}
    missing, unexpected = sorted(wanted_names - stored_names), sorted(stored_names - known)
    problems = [f"it lacks {_listed(missing)}"] if missing else []
    problems += [f"the model lacks {_listed(unexpected)}"] if unexpected else []
    if problems:
        raise CheckpointError(
            f"{what} does not fit the model: {'; '.join(problems)}. Load it into the model that was saved"
            + (", or pass strict=False to load the tensors that both have" if can_be_lax else "")
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def check_shapes(source: TensorSource, into: CheckpointState) -> None:
    """Compare the shapes of a source's and this rank's tensors.

    Raises:
        CheckpointError: some shapes differ; it names them.
    """
    problems = [
        f"{name} is {list(source.tensors[name].global_shape)}, but {list(shape)} in the model"
        for name, tensor in into.items()
        if name in source.tensors
        and source.tensors[name].global_shape != (shape := as_sharded(name, tensor).global_shape)
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN_NAMES} more" if len(problems) > _SHOWN_NAMES else ""
        raise CheckpointError(f"it does not fit the model: {'; '.join(problems[:_SHOWN_NAMES])}{more}")


def check_ties(source: TensorSource, tied: Mapping[str, str], what: str) -> None:
    """Compare the tensors of a tied weight that a source stores several times. Called by one rank."""
    for name, known in tied.items():
        if name in source.tensors and known in source.tensors and not same_values(source, name, known):
            raise CheckpointError(
                f"{what} does not fit the model: it has different values for {name} and {known}, which are one tied "
                "weight in the model; make the model without the tie (tie_word_embeddings=false)"
            )


def same_values(source: TensorSource, name: str, other: str) -> bool:
    """Whether two tensors of a source are equal, compared block by block."""
    info, its = source.tensors[name], source.tensors[other]
    if info.global_shape != its.global_shape or info.dtype != its.dtype:
        return False
    rows, *inner = info.global_shape
    at_a_time = max(1, _BLOCK_BYTES // max(1, info.dtype.itemsize * math.prod(inner)))
    for first in range(0, rows, at_a_time):
        box = Box((first, *(0 for _ in inner)), (min(at_a_time, rows - first), *inner))
        values = [torch.empty(box.shape, dtype=info.dtype) for _ in range(2)]
        fill(source, name, box, values[0])
        fill(source, other, box, values[1])
        if not torch.equal(*values):
            return False
    return True


@torch.no_grad()
def fill_state(source: TensorSource, into: CheckpointState) -> None:
    """Fill this rank's tensors from a source; types are converted, and tensors that it lacks are left alone.

    Extra memory: 16 MiB if the source maps files, otherwise the largest of this rank's boxes.

    Raises:
        CheckpointError: shapes differ (nothing is changed then), elements are missing, or the source cannot be read.
    """
    check_shapes(source, into)
    for name in into.keys() & source.tensors.keys():
        for shard in as_sharded(name, into[name]).shards:
            for block in _blocks(shard.box, shard.tensor.element_size()) if source.is_mapped else [shard.box]:
                _fill(source, name, block, shard)


def _fill(source: TensorSource, name: str, block: Box, destination: Shard) -> None:
    found = source.shards(name, block)
    if uncovered(block, [shard.box for shard in found]):
        raise CheckpointError(f"the stored tensors do not cover {name!r} {block}")
    for shard in found:
        common = shard.box.intersect(block)
        if common is None:
            continue
        values = shard.tensor[common.relative_to(shard.box).slices]
        destination.tensor[common.relative_to(destination.box).slices].copy_(values)
        if source.is_mapped:
            _release(values)


def _blocks(box: Box, item_size: int) -> Iterator[Box]:
    """Yield the rows of a box in blocks of a few megabytes."""
    if not box.shape or not box.num_elements:
        yield box
        return
    row_bytes = box.num_elements // box.shape[0] * item_size
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (count, *box.shape[1:]))


def _release(tensor: Tensor) -> None:
    """Release the whole pages under a view of a read-only mapped file; its values stay readable.

    The system caches these pages while there is room, but counts them as the process's memory; so a memory limit would
    see a rank hold every byte that it has read.
    """
    if not tensor.numel() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + reach * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
