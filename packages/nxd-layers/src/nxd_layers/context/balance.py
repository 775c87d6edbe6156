"""A cut of packed documents that gives all ranks as much to do.

Attention within documents makes a position as much work as there are keys before it in its document, so that the order
"zigzag", which is even for one document, is not for several. Here the row is cut into more chunks, and each goes, the
most work first, to the rank that has the least so far (Graham 1969, "Bounds on Multiprocessing Timing Anomalies").
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nxd_layers.context.cut import SequenceCut

_CHUNKS_OF_A_RANK = (2, 4, 8, 16)  # more of them even out better, and make smaller blocks
_SHORTEST_CHUNK = 128  # positions; smaller blocks are mostly overhead
_EVEN_ENOUGH = 1.05  # times the mean


def balanced_cut(document_ids: Tensor, size: int, *, multiple: int = 1) -> SequenceCut:
    """How to share out packed documents: in zigzag where that is even, else in as few chunks as will do.

    Args:
        document_ids: integer `[batch or 1, seq]`, the number of each token's document, whose tokens are neighbors. The
            same on all ranks, which find the same cut.
        size: context-parallel ranks.
        multiple: as for `SequenceCut`.
    """
    work = _keys_before(document_ids).cpu()  # the one wait for the device
    found: list[tuple[float, SequenceCut]] = []
    for cut in _candidates(work, size, multiple):
        found.append((_unevenness(work, cut), cut))
        if found[-1][0] <= _EVEN_ENOUGH:
            return cut
    return min(found, key=lambda it: it[0])[1]


def _candidates(work: Tensor, size: int, multiple: int) -> Iterator[SequenceCut]:
    yield SequenceCut(len(work), size, multiple=multiple)
    for chunks in _CHUNKS_OF_A_RANK:
        cut = SequenceCut(len(work), size, tuple(range(size)) * chunks, multiple)
        if chunks == 2 or cut.chunk_length >= _SHORTEST_CHUNK:
            yield replace(cut, order=_dealt_out(_sums(work, cut), size))


def _unevenness(work: Tensor, cut: SequenceCut) -> float:
    """Work of the rank that has the most, times the mean."""
    of_chunks = _sums(work, cut)
    most = max(sum(of_chunks[chunk] for chunk in cut.chunks_of(rank)) for rank in range(cut.size))
    return most * cut.size / sum(of_chunks)


def _keys_before(document_ids: Tensor) -> Tensor:
    """Keys that the queries at each position inspect under a causal mask, of all rows: `[seq]`."""
    position = torch.arange(document_ids.shape[1], device=document_ids.device)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    begin = position.where(starts, 0).cummax(dim=1).values
    return (position + 1 - begin).sum(dim=0)


def _sums(work: Tensor, cut: SequenceCut) -> list[int]:
    filled = torch.cat([work, work.new_zeros(cut.filled_length - cut.length)])
    sums: list[int] = filled.view(cut.num_chunks, -1).sum(dim=1).tolist()
    return sums


def _dealt_out(of_chunks: list[int], size: int) -> tuple[int, ...]:
    """The rank of each chunk; all have as many."""
    owners, loads, room = [0] * len(of_chunks), [0] * size, [len(of_chunks) // size] * size
    for chunk in sorted(range(len(of_chunks)), key=lambda it: -of_chunks[it]):
        owner = min((rank for rank in range(size) if room[rank]), key=lambda rank: loads[rank])
        owners[chunk] = owner
        loads[owner] += of_chunks[chunk]
        room[owner] -= 1
    return tuple(owners)
