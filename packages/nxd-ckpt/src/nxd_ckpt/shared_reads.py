"""Boxes that several ranks want: one of these ranks reads each box and sends it to the others.

The ranks agree that all reads succeeded before the first element is sent, so no rank waits for one that failed. All
sends follow from the gathered descriptions, in the same order on all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nxd_ckpt.boxes import Box, gc_paused
from nxd_ckpt.messages import all_are, expect
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE, DTYPE_OF_CODE, pieces_of

_MESSAGE_BYTES = 16 * 2**20

Wants = Mapping[str, tuple[torch.dtype, Sequence[Box]]]


class SharedBox(NamedTuple):
    """A box of a tensor that several ranks want in the same dtype, and the one of them that reads it."""

    reader: int
    ranks: tuple[int, ...]
    name: str
    dtype: torch.dtype
    box: Box

    @property
    def num_bytes(self) -> int:
        """The size of its elements."""
        return self.box.num_elements * self.dtype.itemsize


def encode_wants(wanted: Mapping[str, ShardedTensor]) -> dict[str, tuple[str, list[Box]]]:
    """Return a rank's wanted boxes as a message to the other ranks."""
    return {
        name: (CODE_OF_DTYPE[tensor.dtype], [shard.box for shard in tensor.shards]) for name, tensor in wanted.items()
    }


def decode_wants(message: Any) -> Wants:
    """Read the message of `encode_wants`.

    Raises:
        ValueError, TypeError, KeyError or AttributeError: the message is malformed.
    """
    wants: dict[str, tuple[torch.dtype, list[Box]]] = {}
    for name, (code, boxes) in message.items():
        wants[name] = (DTYPE_OF_CODE[code], [Box(tuple(offsets), tuple(shape)) for offsets, shape in boxes])
        expect(
            all(all_are(int, (*box.offsets, *box.shape)) for box in wants[name][1]), f"invalid boxes of {name!r:.200}"
        )
    return wants


def assign_reads(wants: Sequence[Wants]) -> list[SharedBox]:
    """Assign each box that several ranks want to the one with the least to read, largest boxes first.

    Returns:
        The shared boxes, grouped by reader and ranks, then by descending element size.
    """
    with gc_paused():
        return _share_out(wants)


def _share_out(wants: Sequence[Wants]) -> list[SharedBox]:
    ranks_of: dict[tuple[str, torch.dtype, Box], list[int]] = {}
    for rank, of_rank in enumerate(wants):
        for name, (dtype, boxes) in of_rank.items():
            for box in set(boxes):
                ranks_of.setdefault((name, dtype, box), []).append(rank)
    load = [0] * len(wants)
    shared: list[SharedBox] = []
    for (name, dtype, box), ranks in ranks_of.items():
        one = SharedBox(ranks[0], tuple(ranks), name, dtype, box)
        if len(ranks) == 1:
            load[one.reader] += one.num_bytes
        elif box.num_elements:
            shared.append(one)
    shared.sort(key=lambda one: (-one.num_bytes, one.name, one.box))
    for index, one in enumerate(shared):
        reader = min(one.ranks, key=load.__getitem__)
        load[reader] += one.num_bytes
        shared[index] = one._replace(reader=reader)
    return sorted(shared, key=lambda one: (one.reader, one.ranks, -one.dtype.itemsize, one.name, one.box))


def own_reads(wanted: Mapping[str, ShardedTensor], shared: Iterable[SharedBox], rank: int) -> dict[str, list[Shard]]:
    """Return the shards that this rank reads itself."""
    by_others = {(one.name, one.box) for one in shared if rank in one.ranks and one.reader != rank}
    return {
        name: [shard for shard in tensor.shards if (name, shard.box) not in by_others]
        for name, tensor in wanted.items()
    }


def send_shared(
    shared: Iterable[SharedBox], wanted: Mapping[str, ShardedTensor], process_group: dist.ProcessGroup, timeout: float
) -> None:
    """Send the boxes that this rank has read to the others that want them, and receive theirs. Called by all ranks.

    Raises:
        RuntimeError: a message did not arrive.
    """
    rank = dist.get_rank(process_group)
    buffer = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8, device=_device_of(process_group))
    for (reader, ranks), boxes in groupby(shared, key=lambda one: (one.reader, one.ranks)):
        if rank not in ranks:
            continue
        for pieces in _messages(piece for one in boxes for piece in _pieces_of_all(wanted[one.name], one.box)):
            in_buffer = _laid_out(pieces, buffer)
            message = buffer[: sum(view.nbytes for view in in_buffer)]
            if rank == reader:
                for piece, view in zip(pieces, in_buffer, strict=True):
                    view.copy_(piece[0])
            _send_or_receive(message, rank, reader, ranks, process_group, timeout)
            if rank != reader:
                for piece, view in zip(pieces, in_buffer, strict=True):
                    for destination in piece:
                        destination.copy_(view)


def _send_or_receive(
    message: torch.Tensor,
    rank: int,
    reader: int,
    ranks: Sequence[int],
    process_group: dist.ProcessGroup,
    timeout: float,
) -> None:
    if rank == reader:
        others = [dist.get_global_rank(process_group, other) for other in ranks if other != rank]
        works = [dist.isend(message, other, group=process_group) for other in others]
    else:
        works = [dist.irecv(message, dist.get_global_rank(process_group, reader), group=process_group)]
    for work in works:
        work.wait(timedelta(seconds=timeout))  # type: ignore[union-attr]  # this rank is a member


def _pieces_of_all(tensor: ShardedTensor, box: Box) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views that make up a box, at most a message each, with this rank's other views of the same elements."""
    destinations = [shard.tensor.detach() for shard in tensor.shards if shard.box == box]
    return zip(*(pieces_of(destination, _MESSAGE_BYTES) for destination in destinations), strict=True)


def _messages(pieces: Iterable[tuple[torch.Tensor, ...]]) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    message: list[tuple[torch.Tensor, ...]] = []
    num_bytes = 0
    for piece in pieces:
        if num_bytes + piece[0].nbytes > _MESSAGE_BYTES:
            yield message
            message, num_bytes = [], 0
        message.append(piece)
        num_bytes += piece[0].nbytes
    if message:
        yield message


def _laid_out(pieces: Sequence[tuple[torch.Tensor, ...]], buffer: torch.Tensor) -> list[torch.Tensor]:
    """Return consecutive views of the buffer with these shapes; larger elements come first, so all are aligned."""
    views, start = [], 0
    for piece, *_ in pieces:
        views.append(buffer[start : start + piece.nbytes].view(piece.dtype).view(piece.shape))
        start += piece.nbytes
    return views


def _device_of(process_group: dist.ProcessGroup) -> torch.device:
    """Return the device for a group's messages: the CPU if the backend supports it, else this process's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "cpu:" in dist.get_backend_config(process_group):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
