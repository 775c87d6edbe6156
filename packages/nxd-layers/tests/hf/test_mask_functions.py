"""What is read from the mask functions of transformers, against what they compute."""

import pytest
import torch
from nxd_layers.context import MaskRule, interval_mask, with_blocks
from nxd_layers.hf.mask_functions import BlockRule, rule_of

masking = pytest.importorskip("transformers.masking_utils", reason="masks are those of transformers")

BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, -1]])
LENGTH = BLOCKS.shape[1]
CAUSAL, WINDOW = masking.causal_mask_function, masking.sliding_window_causal_mask_function(3)
OVERLAY = masking.blockwise_overlay(BLOCKS)

FUNCTIONS = {
    "causal": CAUSAL,
    "window": WINDOW,
    "blocks": masking.or_masks(CAUSAL, OVERLAY),
    "blocks and a window outside of them": masking.or_masks(WINDOW, OVERLAY),
    "window around blocks": masking.and_masks(masking.or_masks(CAUSAL, OVERLAY), masking.sliding_window_overlay(3)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rule_of_a_function_allows_the_same_keys(name):
    rule = rule_of(FUNCTIONS[name])

    if isinstance(rule, BlockRule):
        mask = with_blocks(interval_mask(LENGTH, rule.rule), rule.block_ids)
        mask = mask if rule.window is None else mask.within_window(rule.window)
    else:
        mask = interval_mask(LENGTH, rule)
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    expected = FUNCTIONS[name](torch.tensor(0), torch.tensor(0), q, k)
    assert torch.equal(mask.allowed(q.flatten(), k)[0, 0], expected.expand(LENGTH, LENGTH))


def test_chunks_are_read():
    assert rule_of(masking.chunked_causal_mask_function(4, torch.zeros(1))) == MaskRule(chunk=4)


@pytest.mark.parametrize(
    "function",
    [
        masking.or_masks(CAUSAL, masking.bidirectional_mask_function),
        masking.or_masks(CAUSAL, OVERLAY, masking.blockwise_overlay(BLOCKS)),
        masking.or_masks(masking.chunked_causal_mask_function(4, torch.zeros(1)), OVERLAY),
        masking.and_masks(masking.or_masks(CAUSAL, OVERLAY), masking.padding_mask_function(torch.ones(1, LENGTH))),
    ],
    ids=["no blocks", "two kinds of blocks", "chunks", "a condition of its own"],
)
def test_other_functions_are_refused_by_name(function):
    with pytest.raises(ValueError, match=r"context parallelism does not support the mask or_masks\.<locals>"):
        rule_of(function)
