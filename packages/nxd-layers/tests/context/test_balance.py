"""`balanced_cut`: all ranks have as much to do, whatever documents are packed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nxd_layers.context import SequenceCut, balanced_cut


def document_ids(lengths):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def work_of_ranks(lengths, cut):
    """Keys that each rank's queries look at."""
    before = torch.cat([torch.arange(1, length + 1) for length in lengths])
    return [int(before[at[at < cut.length]].sum()) for rank in range(cut.size) for at in [cut.positions_of(rank)]]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "lengths",
    [[8192], [6000, 2192], [2192, 6000], [3000] * 2 + [100] * 21 + [92], [512] * 16, [100] * 41 + [4092]],
    ids=["one", "long first", "long last", "short ones", "alike", "very long last"],
)
def test_work_is_even(size, lengths):
    cut = balanced_cut(document_ids(lengths), size)
    work = work_of_ranks(lengths, cut)
    assert max(work) * size <= 1.05 * sum(work)
    assert (cut.order == "zigzag") == (
        max(w := work_of_ranks(lengths, SequenceCut(8192, size))) * size <= 1.05 * sum(w)
    )


def test_one_document_is_cut_in_zigzag():
    assert balanced_cut(torch.zeros(2, 4000, dtype=torch.int64), 4, multiple=2) == SequenceCut(4000, 4, multiple=2)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 3))
def test_work_is_never_less_even_than_in_zigzag(lengths, size, multiple):
    cut = balanced_cut(document_ids(lengths), size, multiple=multiple)
    assert cut.length == sum(lengths)
    assert cut.chunk_length % multiple == 0
    zigzag = max(work_of_ranks(lengths, SequenceCut(sum(lengths), size, multiple=multiple)))
    assert max(work_of_ranks(lengths, cut)) <= max(zigzag, 1.05 * sum(work_of_ranks(lengths, cut)) / size)


def test_an_order_gives_all_ranks_as_many_chunks():
    with pytest.raises(ValueError, match="must give each of 2 ranks the same number of chunks"):
        SequenceCut(8, 2, (0, 1, 1))
    with pytest.raises(ValueError, match="must give each of 3 ranks the same number of chunks"):
        SequenceCut(8, 3, (0, 1))
