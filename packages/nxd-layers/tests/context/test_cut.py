"""`SequenceCut`: which positions each rank has."""

import pytest
import torch
from nxd_layers.context import MaskRule, SequenceCut, interval_mask

CUTS = [
    SequenceCut(13, 2),
    SequenceCut(16, 4),
    SequenceCut(16, 4, "contiguous"),
    SequenceCut(12, 2, (0, 1, 0, 0, 1, 1), 2),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_part_and_positions_of_a_rank_that_is_data_are_those_of_its_number(cut):
    whole = torch.randn(3, cut.length, 2)

    for rank in range(cut.size):
        as_data = torch.tensor(rank)
        assert torch.equal(cut.part_of(whole, as_data, fill=7), cut.part_of(whole, rank, fill=7))
        assert torch.equal(cut.positions_of(as_data), cut.positions_of(rank))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_parts_of_all_ranks_are_the_whole(cut):
    whole = torch.arange(float(cut.length)).view(1, -1)

    parts = torch.cat([cut.part_of(whole, torch.tensor(rank)) for rank in range(cut.size)], dim=1)

    assert torch.equal(cut.whole_of(parts), whole)


@pytest.mark.parametrize("given", ["document_ids", "padding_mask"])
def test_masks_of_data_are_refused_where_graphs_are_recorded(given, monkeypatch):
    monkeypatch.setattr("nxd_layers.context.mask.is_lazy_device", lambda device: True)

    with pytest.raises(NotImplementedError, match="XLA does not support"):
        interval_mask(4, MaskRule(), **{given: torch.ones(1, 4, dtype=torch.int64)})
