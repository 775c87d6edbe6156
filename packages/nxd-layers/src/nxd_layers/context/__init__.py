"""Context parallelism: one sequence cut over several ranks, and the attention of all its positions."""

from nxd_layers.context.attention import Transport, cheapest_transport, context_parallel_attention
from nxd_layers.context.cut import Order, SequenceCut, balanced_cut
from nxd_layers.context.mask import IntervalMask, MaskRule, interval_mask, with_blocks
from nxd_layers.context.plan import AttentionPlan, Block, causal_plan, own_part, own_positions, whole_sequence
from nxd_layers.mappings import sum_over_contexts

__all__ = [
    "AttentionPlan",
    "Block",
    "IntervalMask",
    "MaskRule",
    "Order",
    "SequenceCut",
    "Transport",
    "balanced_cut",
    "causal_plan",
    "cheapest_transport",
    "context_parallel_attention",
    "interval_mask",
    "own_part",
    "own_positions",
    "sum_over_contexts",
    "whole_sequence",
    "with_blocks",
]
