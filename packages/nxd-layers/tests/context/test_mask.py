"""Masks as intervals, against dense ones by the definition of each rule."""

import pytest
import torch
from nxd_layers.context import MaskRule, interval_mask, with_blocks

BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, 2, 2], [0, 0, -1, 3, -1, -1, 7, 7, 7, 7]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2], [0] * 8 + [1, 1]])
TOKENS = torch.tensor([[1] * 10, [1] * 8 + [0, 0]])
LENGTH = BLOCKS.shape[1]


def dense(rule, *, documents=None, tokens=None):
    """The mask with blocks: bool `[batch, seq, seq]`."""
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    allowed = (k <= q) & (k > q - (rule.window or LENGTH))
    allowed = allowed | (BLOCKS[:, :, None] == BLOCKS[:, None]) & (BLOCKS[:, :, None] >= 0)
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None])
    return allowed if tokens is None else allowed & (tokens[:, None] == 1)


@pytest.mark.parametrize("rule", [MaskRule(), MaskRule(window=2)], ids=str)
@pytest.mark.parametrize(
    "given", [{}, {"document_ids": DOCUMENTS}, {"padding_mask": TOKENS}], ids=["plain", "documents", "padding"]
)
def test_queries_of_a_block_read_all_of_it(rule, given):
    mask = with_blocks(interval_mask(LENGTH, rule, **given), BLOCKS, **given)

    allowed = mask.allowed(torch.arange(LENGTH), torch.arange(LENGTH)).squeeze(1)
    expected = dense(rule, documents=given.get("document_ids"), tokens=given.get("padding_mask"))
    of_tokens = given.get("padding_mask", torch.ones_like(TOKENS)).bool()
    assert torch.equal(allowed[of_tokens], expected[of_tokens])


def test_window_around_a_mask_with_blocks_leaves_out_keys_before_it():
    mask = with_blocks(interval_mask(LENGTH, MaskRule()), BLOCKS).within_window(2)

    allowed = mask.allowed(torch.arange(LENGTH), torch.arange(LENGTH)).squeeze(1)
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    assert torch.equal(allowed, dense(MaskRule()) & (k > q - 2))


def test_block_in_two_parts_is_refused():
    with pytest.raises(ValueError, match="row 0 has other tokens inside a block"):
        with_blocks(interval_mask(4, MaskRule()), torch.tensor([[0, -1, 0, 1]]))
