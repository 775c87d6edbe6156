"""The exchange methods: how keys and values reach the ranks whose queries read them, and their gradients return.

Ring and all-gather send each rank only what its plan needs. A rank gives `[batch, kv_heads, local, n]` and gets pieces
of chunks at known positions. By all-to-all ranks exchange a part of the sequence of all heads for the whole sequence of
some heads (Jacobs et al. 2023, "DeepSpeed Ulysses"); those functions are at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from nxd_state import Group, Pending, Receive, Send, all_to_all_v, batch_isend_irecv
from torch import Tensor

from nxd_layers.context.cut import SequenceCut
from nxd_layers.context.plan import AttentionPlan
from nxd_layers.mappings import all_to_all_region

_HEADS, SEQUENCE = 1, 2  # dims of `[batch, kv_heads, seq, n]`

Pieces = Mapping[int, Tensor]  # by chunk: `[batch, kv_heads, needed, n]`


class Exchange(Protocol):
    """Sends keys and values to the ranks that need them, and gradients back."""

    def pieces(self, local: Tensor) -> Iterator[Pieces]:
        """Yield the pieces that this rank needs, rank by rank, its own first."""

    def return_gradients(self, gradients: Iterator[Pieces], like: Tensor) -> Tensor:
        """Return the sum of all ranks' gradients of `local`.

        Args:
            gradients: gradients of the results of `pieces`, in the same order, in the dtype of `like`.
            like: tensor with the shape of this rank's input.
        """


class RingExchange:
    """Sends pieces step by step: the next rank's pieces travel while those of the last rank are used.

    The steps are those of Liu et al. 2023 ("Ring Attention"), but pieces come directly from the rank that has them, so
    no rank forwards pieces that it does not need.
    """

    def __init__(self, plan: AttentionPlan, group: Group) -> None:
        self._parts = _Parts(plan, group.rank)
        self._group = group

    def pieces(self, local: Tensor) -> Iterator[Pieces]:
        """See `Exchange`."""
        current = self._parts.own(local)
        for source, user in self._steps():
            buffer = self._parts.room_for(local, source)
            pending = self._begin(self._parts.needed_by(local, user), user, buffer, source)
            yield current
            _wait_for(pending)
            current = self._parts.of(buffer, source)
        yield current

    def return_gradients(self, gradients: Iterator[Pieces], like: Tensor) -> Tensor:
        """See `Exchange`."""
        total = torch.zeros_like(like)
        self._parts.add_own(total, next(gradients))
        arriving: tuple[list[Pending[Tensor]], Tensor, int] | None = None
        for (source, user), pieces in zip(self._steps(), gradients, strict=True):
            buffer = self._parts.needed_by(total, user).contiguous()  # of the right shape; it is written over
            if arriving is not None:
                self._finish(total, *arriving)
            arriving = self._begin(_joined(pieces, like), source, buffer, user), buffer, user
        if arriving is not None:
            self._finish(total, *arriving)
        return total

    def _steps(self) -> list[tuple[int, int]]:
        """For each step, the rank whose keys are used here, and the rank that uses this rank's keys."""
        rank, size = self._group.rank, self._group.size
        return [((rank - step) % size, (rank + step) % size) for step in range(1, size)]

    def _begin(self, sent: Tensor, destination: int, buffer: Tensor, source: int) -> list[Pending[Tensor]]:
        messages: list[Send | Receive] = []
        if sent.shape[SEQUENCE]:
            messages.append(Send(sent.contiguous(), destination))
        if buffer.shape[SEQUENCE]:
            messages.append(Receive(buffer, source))
        return batch_isend_irecv(messages, self._group)

    def _finish(self, total: Tensor, pending: list[Pending[Tensor]], buffer: Tensor, user: int) -> None:
        _wait_for(pending)
        self._parts.add(total, buffer, user)


class GatherExchange:
    """Sends all pieces at once, before the first is used: one message per pair of ranks, and more memory."""

    def __init__(self, plan: AttentionPlan, group: Group) -> None:
        self._parts = _Parts(plan, group.rank)
        self._group = group

    def pieces(self, local: Tensor) -> Iterator[Pieces]:
        """See `Exchange`."""
        received = self._exchange(
            [self._parts.needed_by(local, user) for user in range(self._group.size)],
            [self._parts.room_for(local, source).shape[SEQUENCE] for source in range(self._group.size)],
        )
        yield self._parts.own(local)
        for source in self._sources():
            yield self._parts.of(received[source], source)

    def return_gradients(self, gradients: Iterator[Pieces], like: Tensor) -> Tensor:
        """See `Exchange`."""
        total = torch.zeros_like(like)
        self._parts.add_own(total, next(gradients))
        returned = {source: _joined(pieces, like) for source, pieces in zip(self._sources(), gradients, strict=True)}
        nothing = like.narrow(SEQUENCE, 0, 0)
        received = self._exchange(
            [returned.get(source, nothing) for source in range(self._group.size)],
            [self._parts.needed_by(like, user).shape[SEQUENCE] for user in range(self._group.size)],
        )
        for user in reversed(self._sources()):
            self._parts.add(total, received[user], user)
        return total

    def _sources(self) -> list[int]:
        rank, size = self._group.rank, self._group.size
        return [(rank - step) % size for step in range(1, size)]

    def _exchange(self, sent: Sequence[Tensor], receive_counts: Sequence[int]) -> Sequence[Tensor]:
        rows = torch.cat([it.movedim(SEQUENCE, 0) for it in sent])
        counts = [it.shape[SEQUENCE] for it in sent]
        received = all_to_all_v(rows, self._group, send_counts=counts, receive_counts=receive_counts)
        return [it.movedim(0, SEQUENCE) for it in received.split(list(receive_counts))]


class NoExchange:
    """Sends nothing: one rank has the whole sequence."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._parts = _Parts(plan, 0)

    def pieces(self, local: Tensor) -> Iterator[Pieces]:
        """See `Exchange`."""
        yield self._parts.own(local)

    def return_gradients(self, gradients: Iterator[Pieces], like: Tensor) -> Tensor:
        """See `Exchange`."""
        total = torch.zeros_like(like)
        self._parts.add_own(total, next(gradients))
        return total


class _Parts:
    """The parts of a rank's chunks that are sent, and their places."""

    def __init__(self, plan: AttentionPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank

    def own(self, local: Tensor) -> Pieces:
        """The pieces that this rank needs of its own chunks."""
        return {chunk: self._within(local, chunk, part) for chunk, part in self._needed_from(self._rank)}

    def needed_by(self, local: Tensor, user: int) -> Tensor:
        """This rank's positions that another rank needs; none for this rank itself."""
        nothing = local.narrow(SEQUENCE, 0, 0)
        if user == self._rank:
            return nothing
        parts = self._plan.sent(self._rank, user)
        return torch.cat([nothing, *(self._within(local, *part) for part in parts)], SEQUENCE)

    def room_for(self, like: Tensor, source: int) -> Tensor:
        """Memory for the positions that another rank sends."""
        parts = [] if source == self._rank else self._needed_from(source)
        shape = list(like.shape)
        shape[SEQUENCE] = sum(stop - first for _, (first, stop) in parts)
        return like.new_empty(shape)

    def of(self, received: Tensor, source: int) -> Pieces:
        """Split the positions that another rank has sent into pieces."""
        parts = self._needed_from(source)
        pieces = received.split([stop - first for _, (first, stop) in parts], SEQUENCE)
        return {chunk: piece for (chunk, _), piece in zip(parts, pieces, strict=True)}

    def add(self, total: Tensor, received: Tensor, user: int) -> None:
        """Add the gradients that another rank has returned."""
        parts = self._plan.sent(self._rank, user)
        pieces = received.split([stop - first for _, (first, stop) in parts], SEQUENCE)
        for part, piece in zip(parts, pieces, strict=True):
            self._within(total, *part).add_(piece)

    def add_own(self, total: Tensor, pieces: Pieces) -> None:
        """Add this rank's own gradients of its pieces."""
        for chunk, part in self._needed_from(self._rank):
            self._within(total, chunk, part).add_(pieces[chunk])

    def _needed_from(self, source: int) -> list[tuple[int, tuple[int, int]]]:
        return self._plan.sent(source, self._rank)

    def _within(self, local: Tensor, chunk: int, part: tuple[int, int]) -> Tensor:
        """A part of a chunk of this rank, as a view."""
        cut = self._plan.cut
        begin = cut.chunks_of(self._rank).index(chunk) * cut.chunk_length - chunk * cut.chunk_length
        return local.narrow(SEQUENCE, begin + part[0], part[1] - part[0])


def _joined(pieces: Pieces, like: Tensor) -> Tensor:
    return torch.cat([like.narrow(SEQUENCE, 0, 0), *pieces.values()], SEQUENCE)


def _wait_for(pending: Sequence[Pending[Tensor]]) -> None:
    for message in pending:
        message.wait()


def splits_heads(num_heads: int, num_key_value_heads: int, size: int) -> bool:
    """Whether the heads can be divided evenly over this many ranks; too few key and value heads are copied."""
    return num_heads % size == 0 and (num_key_value_heads % size == 0 or size % num_key_value_heads == 0)


def exchange_heads(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, cut: SequenceCut, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Exchange this rank's part of the sequence for its heads of the whole sequence.

    Args:
        query: `[batch, heads, local, head]`.
        key: `[batch, kv_heads, local, head]`.
        value: `[batch, kv_heads, local, value_head]`.
        sinks: `[heads]` or None.
        cut: cut of the sequence.
        group: the context-parallel ranks.

    Returns:
        `[batch, heads/cp, filled, head]` and the others likewise, in sequence order. With fewer key and value heads
        than ranks, each rank has a copy of the head that its query heads need.
    """
    copies = max(1, group.size // key.shape[_HEADS])
    keys_and_values = torch.cat([key, value], dim=-1).repeat_interleave(copies, dim=_HEADS)
    whole = _to_heads(keys_and_values, cut, group)
    whole_key, whole_value = whole.split([key.shape[-1], value.shape[-1]], dim=-1)
    own_sinks = None
    if sinks is not None:
        own_sinks = sinks.view(group.size, -1).index_select(0, group.rank_tensor(sinks).view(1)).squeeze(0)
    return _to_heads(query, cut, group), whole_key, whole_value, own_sinks


def return_heads(output: Tensor, cut: SequenceCut, group: Group) -> Tensor:
    """The inverse for `[batch, heads/cp, filled, value_head]`: `[batch, heads, local, value_head]`."""
    filled = _filled(cut)
    by_rank = torch.cat([filled.part_of(output, rank, dim=SEQUENCE) for rank in range(cut.size)], dim=SEQUENCE)
    returned: Tensor = all_to_all_region(by_rank, group, SEQUENCE, _HEADS)
    return returned


def _to_heads(local: Tensor, cut: SequenceCut, group: Group) -> Tensor:
    by_rank: Tensor = all_to_all_region(local, group, _HEADS, SEQUENCE)
    return _filled(cut).whole_of(by_rank, dim=SEQUENCE)


def _filled(cut: SequenceCut) -> SequenceCut:
    return SequenceCut(cut.filled_length, cut.size, cut.order, cut.multiple)
