"""The two messages of ZeRO-1 on flat buffers: the mean of one part arrives here, all parts arrive in place.

What is sent and when is decided by the buckets. Every buffer's length is a multiple of the group's size; rank r's
part is the r-th.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from nxd_state import Group, Pending, Receive, Send, batch_isend_irecv, reduce_scatter
from torch import Tensor

# torch 2.13 gives this a shorter name and warns about the one before.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Transfer:
    """A message under way. `wait()` may be called more than once."""

    def __init__(self, works: Sequence[Pending | dist.Work], finish: Callable[[], Tensor]) -> None:
        self._works = works
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """What was asked for, once it is there."""
        if self._finish is not None:
            for work in self._works:
                work.wait()
            self._result, self._works, self._finish = self._finish(), (), None
        assert self._result is not None
        return self._result


@torch.no_grad()
def reduce_scatter_mean(
    buffer: Tensor, group: Group, *, sum_dtype: torch.dtype, dtype: torch.dtype, out: Tensor | None = None
) -> Transfer:
    """Start to average the ranks' buffers; this rank gets its part, in `dtype`.

    On the CPU, half-precision parts are always added in at least float32. The buffer may be reused after `wait()`.

    Args:
        buffer: 1-d, of the same length and dtype on every rank.
        group: the ranks.
        sum_dtype: in which the transport adds.
        dtype: of the result.
        out: memory for the result, of its length and dtype; taken where several ranks of the CPU average.
    """
    if group.size == 1:
        return Transfer([], lambda: buffer.to(dtype))
    if buffer.device.type != "cpu":
        pending = reduce_scatter(buffer.to(sum_dtype), group, op="avg", async_op=True)
        return Transfer([], lambda: pending.wait().to(dtype))
    # Parts are sent straight to the rank that adds them: gloo's own reduce-scatter moves twice the bytes, and its
    # all-to-all copies them twice (24 MB among 2 ranks: 13 ms, 19 ms through all-to-all, 29 ms by all-reduce).
    parts = buffer.chunk(group.size)
    received = [torch.empty_like(part) for part in parts[2:]]
    received.insert(0, out if out is not None and out.dtype == buffer.dtype else torch.empty_like(parts[0]))
    works = _exchange(list(parts), received, group)
    own = parts[group.rank]

    @torch.no_grad()
    def add() -> Tensor:
        total = received[0].to(torch.promote_types(buffer.dtype, torch.float32))
        for part in (*received[1:], own):
            total += part
        total.div_(group.size)
        return total.to(dtype) if out is None or out is total else out.copy_(total)

    return Transfer(works, add)


@torch.no_grad()
def all_gather_(buffer: Tensor, group: Group) -> Transfer:
    """Start to fill `buffer` with the ranks' parts of it, each rank sending its own from there."""
    if group.size == 1:
        return Transfer([], lambda: buffer)
    parts = buffer.chunk(group.size)
    own = parts[group.rank]
    if buffer.device.type != "cpu":
        return Transfer([_all_gather_single(buffer, own, group=group.process_group, async_op=True)], lambda: buffer)
    others = [part for index, part in enumerate(parts) if index != group.rank]
    return Transfer(_exchange([own] * group.size, others, group), lambda: buffer)


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: Group) -> list[Pending]:
    """Send `sent[i]` to rank i of the group, and receive what the other ranks, in order, send here; as bytes."""
    others = [index for index in range(group.size) if index != group.rank]
    receives = [Receive(tensor.view(torch.uint8), index) for tensor, index in zip(received, others, strict=True)]
    sends = [Send(sent[index].view(torch.uint8), index) for index in others]
    return batch_isend_irecv([*receives, *sends], group)
