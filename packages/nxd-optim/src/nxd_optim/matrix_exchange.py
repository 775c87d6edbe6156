"""Computes with whole matrices of which each rank holds parts.

Each logical matrix has one owner among the ranks that together hold it. The owner gathers the parts, computes, and
sends every rank its part of the result. Messages carry many matrices, and travel while the owners compute others.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from nxd_state import (
    Box,
    Group,
    Pending,
    Receive,
    Send,
    all_gather_object,
    barrier,
    batch_isend_irecv,
    get_device,
    is_cpu,
    is_lazy_device,
)
from torch import Tensor

ROUND_ELEMENTS = 2**25  # elements of an owner's matrices that travel at a time


@dataclass(frozen=True)
class MatrixKey:
    """Names a matrix on all ranks that hold parts of it.

    Attributes:
        parameter: index of the parameter, the same on all ranks.
        name: name of the logical tensor, as in `ShardPiece`.
        index: index of the matrix in a stack `[matrices, rows, columns]`; 0 for a single matrix.
        section: index of the matrix among those that are fused, as in `MatrixLayout.sections`; 0 for a single matrix.
    """

    parameter: int
    name: str
    index: int
    section: int


@dataclass(frozen=True, eq=False)
class MatrixPart:
    """A box of a matrix that this rank holds.

    Attributes:
        key: the matrix.
        shape: shape of the whole matrix, `(rows, columns)`.
        box: the elements.
        values: their values in the order of the box, possibly in more dims; the results replace them.
    """

    key: MatrixKey
    shape: tuple[int, ...]
    box: Box
    values: Tensor


@dataclass(frozen=True)
class _Holding:
    """A part of a matrix on some rank, by its position in that rank's list."""

    rank: int
    position: int
    box: Box


@dataclass(frozen=True, eq=False)
class _Matrix:
    key: MatrixKey
    shape: tuple[int, ...]
    holdings: list[_Holding]
    owner: int
    sources: list[_Holding] = field(default_factory=list)  # without those whose elements another rank sends


class MatrixExchange:
    """The owners of the matrices of which a group's ranks hold parts, and the messages from and to them.

    Owners are chosen so that all compute about equally long. Ranks that hold the same elements must hold the same
    values.

    Args:
        parts: this rank's parts, in an order that does not change; ranks may hold none.
        group: the ranks that together hold the matrices whole. All of them make the exchange together.

    Raises:
        ValueError: the ranks do not hold all elements of a matrix; all ranks raise.
        NotImplementedError: several ranks on XLA, where all record the same graph.
    """

    def __init__(self, parts: Sequence[MatrixPart], group: Group) -> None:
        self._group = group
        if group.size > 1 and is_lazy_device():
            raise NotImplementedError(
                "matrices cannot be gathered at their owners on XLA, where every rank records the same graph; "
                "use an elementwise optimizer, such as AdamW"
            )
        announced = all_gather_object([(it.key, it.shape, it.box) for it in parts], group)
        matrices = _assign(announced, group)
        self._rounds = _rounds(matrices, group.size)
        if group.size > 1 and not is_cpu(get_device()):
            barrier(group)  # the first operation of a group on an accelerator must be one of all its ranks

    @torch.no_grad()
    def compute(
        self,
        parts: Sequence[MatrixPart],
        function: Callable[[MatrixKey, Tensor], Tensor],
        parameters: Collection[int],
    ) -> None:
        """Replace the values of this rank's parts by those of the results. Called by all ranks of the group.

        Args:
            parts: this rank's parts, listed as those that the exchange was made of.
            function: the computation of a whole matrix; returns one of the same shape and dtype.
            parameters: indices of the parameters whose matrices are computed, the same on all ranks.
        """
        rounds = [[it for it in matrices if it.key.parameter in parameters] for matrices in self._rounds]
        rounds = [it for it in rounds if it]
        gathered = self._begin_gather(rounds[0], parts) if rounds else None
        scattering: _Scatter | None = None
        for number, matrices in enumerate(rounds):
            assert gathered is not None
            wholes = gathered.wait()
            if number + 1 < len(rounds):
                gathered = self._begin_gather(rounds[number + 1], parts)
            results = {key: function(key, whole) for key, whole in wholes.items()}
            if scattering is not None:
                scattering.wait()
            scattering = self._begin_scatter(matrices, results, parts)
        if scattering is not None:
            scattering.wait()

    def _begin_gather(self, matrices: Sequence[_Matrix], parts: Sequence[MatrixPart]) -> "_Gather":
        rank = self._group.rank
        own = [it for it in matrices if it.owner == rank]
        sent = {
            owner: [
                parts[it.position].values for m in matrices if m.owner == owner for it in m.sources if it.rank == rank
            ]
            for owner in self._others()
        }
        received = {
            source: [(m, it) for m in own for it in m.sources if it.rank == source] for source in self._others()
        }
        like = parts[0].values if parts else None
        lengths = {source: sum(it.box.numel for _, it in found) for source, found in received.items()}
        buffers, pending = self._exchange(sent, lengths, like)
        return _Gather(own, rank, parts, received, buffers, pending)

    def _begin_scatter(
        self, matrices: Sequence[_Matrix], results: dict[MatrixKey, Tensor], parts: Sequence[MatrixPart]
    ) -> "_Scatter":
        rank = self._group.rank
        for matrix in matrices:
            if matrix.owner == rank:
                for it in matrix.holdings:
                    if it.rank == rank:
                        values = parts[it.position].values
                        values.copy_(results[matrix.key][it.box.slices].reshape(values.shape))
        sent = {
            holder: [
                results[m.key][it.box.slices]
                for m in matrices
                if m.owner == rank
                for it in m.holdings
                if it.rank == holder
            ]
            for holder in self._others()
        }
        received = {
            owner: [parts[it.position] for m in matrices if m.owner == owner for it in m.holdings if it.rank == rank]
            for owner in self._others()
        }
        lengths = {owner: sum(it.box.numel for it in found) for owner, found in received.items()}
        buffers, pending = self._exchange(sent, lengths, parts[0].values if parts else None)
        return _Scatter(received, buffers, pending)

    def _exchange(
        self, sent: dict[int, list[Tensor]], lengths: dict[int, int], like: Tensor | None
    ) -> tuple[dict[int, Tensor], list[Pending[Tensor]]]:
        """Begin to send each rank its tensors and to receive so many elements from each; none take no message."""
        like = next((it for found in sent.values() for it in found), like)
        buffers = {}
        for source, length in lengths.items():
            if length:
                assert like is not None  # an owner of matrices holds parts itself
                buffers[source] = like.new_empty(length)
        messages: list[Send | Receive] = [Receive(buffer, source) for source, buffer in buffers.items()]
        messages += [
            Send(torch.cat([it.reshape(-1) for it in found]), destination)
            for destination, found in sent.items()
            if found
        ]
        return buffers, batch_isend_irecv(messages, self._group)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.size) if rank != self._group.rank]


@dataclass(frozen=True, eq=False)
class _Gather:
    """The parts of a round's matrices on their way to their owner."""

    own: list[_Matrix]
    rank: int
    parts: Sequence[MatrixPart]
    received: dict[int, list[tuple[_Matrix, _Holding]]]
    buffers: dict[int, Tensor]
    pending: list[Pending[Tensor]]

    def wait(self) -> dict[MatrixKey, Tensor]:
        """Return the whole matrices that this rank owns."""
        for message in self.pending:
            message.wait()
        wholes = {}
        for matrix in self.own:
            mine = [it for it in matrix.sources if it.rank == self.rank]
            values = self.parts[mine[0].position].values if mine else self.parts[0].values
            if len(mine) == len(matrix.sources) == 1 and _is_dense(values):
                wholes[matrix.key] = values  # not a copy, so that it keeps the layout in memory
                continue
            whole = wholes[matrix.key] = values.new_empty(matrix.shape)
            for it in mine:
                whole[it.box.slices].copy_(self.parts[it.position].values.reshape(it.box.shape))
        for source, found in self.received.items():
            if found:
                pieces = self.buffers[source].split([it.box.numel for _, it in found])
                for (matrix, it), piece in zip(found, pieces, strict=True):
                    wholes[matrix.key][it.box.slices].copy_(piece.view(it.box.shape))
        return wholes


@dataclass(frozen=True, eq=False)
class _Scatter:
    """The parts of a round's results on their way to their holders."""

    received: dict[int, list[MatrixPart]]
    buffers: dict[int, Tensor]
    pending: list[Pending[Tensor]]

    def wait(self) -> None:
        """Fill this rank's parts."""
        for message in self.pending:
            message.wait()
        for owner, found in self.received.items():
            if found:
                pieces = self.buffers[owner].split([it.box.numel for it in found])
                for part, piece in zip(found, pieces, strict=True):
                    part.values.copy_(piece.view(part.values.shape))


def _is_dense(values: Tensor) -> bool:
    """Whether values fill their memory as a matrix or its transpose; not every second column, say."""
    return values.dim() == 2 and (values.is_contiguous() or values.T.is_contiguous())


def _assign(announced: Sequence[Sequence[tuple[MatrixKey, tuple[int, ...], Box]]], group: Group) -> list[_Matrix]:
    """Choose each matrix's owner and who sends it which elements: the most expensive first, to the least busy holder.

    The same on every rank.
    """
    shapes: dict[MatrixKey, tuple[int, ...]] = {}
    holdings: dict[MatrixKey, list[_Holding]] = {}
    for rank, parts in enumerate(announced):
        for position, (key, shape, box) in enumerate(parts):
            shapes.setdefault(key, shape)
            holdings.setdefault(key, []).append(_Holding(rank, position, box))
    by_cost = sorted(shapes, key=lambda key: (-_cost(shapes[key]), key.parameter, key.name, key.index, key.section))
    busy = [0] * group.size
    matrices = []
    for key in by_cost:
        found = holdings[key]
        held = {it.box: it.box.numel for it in found}
        if sum(held.values()) < prod(shapes[key]):
            raise ValueError(
                f"{group} holds {sum(held.values())} of the {prod(shapes[key])} elements of matrix {key} of shape "
                f"{shapes[key]}; the parameter's ShardSpec must say which part each rank has"
            )
        owner = min({it.rank for it in found}, key=lambda rank: (busy[rank], rank))
        busy[owner] += _cost(shapes[key])
        matrices.append(_Matrix(key, shapes[key], found, owner, _sources(found, owner)))
    return matrices


def _sources(holdings: Sequence[_Holding], owner: int) -> list[_Holding]:
    """Return one holding of each box: the owner's own, or that of the first rank."""
    chosen: dict[Box, _Holding] = {}
    for it in sorted(holdings, key=lambda it: (it.rank != owner, it.rank)):
        chosen.setdefault(it.box, it)
    return list(chosen.values())


def _cost(shape: tuple[int, ...]) -> int:
    """Return the multiplications of a product of a matrix with its transpose, on the shorter side."""
    return prod(shape) * min(shape)


def _rounds(matrices: Sequence[_Matrix], ranks: int) -> list[list[_Matrix]]:
    """Divide the matrices, sorted by cost, into rounds in which each owner has at most `ROUND_ELEMENTS`, or one."""
    rounds: list[list[_Matrix]] = []
    number, filled = [0] * ranks, [0] * ranks
    for matrix in matrices:
        owner, size = matrix.owner, prod(matrix.shape)
        if filled[owner] and filled[owner] + size > ROUND_ELEMENTS:
            number[owner], filled[owner] = number[owner] + 1, 0
        filled[owner] += size
        while len(rounds) <= number[owner]:
            rounds.append([])
        rounds[number[owner]].append(matrix)
    return rounds
