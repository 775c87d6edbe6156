"""How many bytes a rank sends in a training step: in the graph that torch-xla records, and at the least."""

import math
from fractions import Fraction

from nxd_doctor.graphs import find_collectives, parse_hlo
from training_steps import CONFIG, GLOBAL_BATCH, SEQUENCE, Layout

# torch-xla chains a graph's collectives by a number that each all-reduce takes along, of its own type. Its bytes:
TOKENS = {"f32[]": 4, "s64[]": 8}


def sent_bytes(text: str, world_size: int) -> int:
    """Of a graph's collectives, by the rings' count; without torch-xla's own tokens."""
    collectives = find_collectives(parse_hlo(text), world_size=world_size)
    tokens = sum(
        Fraction(2 * TOKENS[it.shapes[-1]] * (it.group_size - 1), it.group_size)
        for it in collectives
        if it.kind == "all-reduce" and it.shapes[-1] in TOKENS
    )
    return sum(it.step_bytes for it in collectives) - math.ceil(tokens)


def least_bytes(layout: Layout, world_size: int) -> int:
    """What a rank must send for one step, by the rings' count: see `nxd_doctor.graphs.operations`.

    Without sequence parallelism an all-reduce of the activations after attention, MLP and embedding forward, and before
    attention, MLP and head backward; with it as many bytes in pairs of all-gather and reduce-scatter, and the norms'
    gradients. For the loss three numbers a token. Over replicas, which context-parallel ranks are for gradients, the
    gradients, once each way. For the gradient's norm one number. Over context-parallel ranks queries, keys, values and
    outputs of attention, once forward and once backward, and of each microbatch the loss and its number of labels,
    which has 8 bytes.
    """
    replicas = world_size // layout.tp
    dp = replicas // layout.cp
    tp_share, cp_share, dp_share = (Fraction(size - 1, size) for size in (layout.tp, layout.cp, replicas))
    layers, hidden = CONFIG.num_hidden_layers, CONFIG.hidden_size
    tokens = GLOBAL_BATCH // dp * SEQUENCE // layout.cp
    norms = (2 * layers + 1) * hidden
    attention = 2 * hidden * hidden + 2 * CONFIG.num_key_value_heads * CONFIG.head_size * hidden
    matrices = 2 * CONFIG.vocab_size * hidden + layers * (attention + 3 * CONFIG.intermediate_size * hidden)
    over_tp = tokens * hidden * (4 * layers + 2) + 3 * tokens + 1
    if layout.sequence_parallel:
        over_tp += norms // replicas if layout.zero1 else norms
    over_dp = matrices // layout.tp + norms + (1 if layout.zero1 else 0)
    heads, key_value_heads = CONFIG.num_attention_heads, max(CONFIG.num_key_value_heads, layout.tp * layout.cp)
    over_cp = layers * tokens * 2 * (heads + key_value_heads) * CONFIG.head_size // layout.tp + 3 * layout.accumulation
    return int(2 * 4 * (tp_share * over_tp + cp_share * over_cp + dp_share * over_dp))
