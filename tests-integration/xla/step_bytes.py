"""How many bytes a rank sends in a training step: in the graph that torch-xla records, and at the least."""

import math
from fractions import Fraction

from nxd_state.xla_inspect import find_collectives, parse_hlo
from training_steps import CONFIG, GLOBAL_BATCH, SEQUENCE, Layout

TOKEN = "f32[]"  # torch-xla chains a graph's collectives by a number that each all-reduce takes along


def sent_bytes(text: str, world_size: int) -> int:
    """Of a graph's collectives, by the rings' count; without torch-xla's own tokens."""
    collectives = find_collectives(parse_hlo(text), world_size=world_size)
    tokens = sum(
        Fraction(2 * 4 * (it.group_size - 1), it.group_size) for it in collectives if it.shapes[-1:] == (TOKEN,)
    )
    return sum(it.step_bytes for it in collectives) - math.ceil(tokens)


def least_bytes(layout: Layout, world_size: int) -> int:
    """What a rank must send for one step, by the rings' count: see `nxd_state.xla_inspect.collectives`.

    Without sequence parallelism an all-reduce of the activations after attention, MLP and embedding forward, and before
    attention, MLP and head backward; with it as many bytes in pairs of all-gather and reduce-scatter, and the norms'
    gradients. For the loss three numbers a token. Over replicas the gradients, once each way. For the gradient's norm
    one number.
    """
    dp = world_size // layout.tp
    tp_share, dp_share = Fraction(layout.tp - 1, layout.tp), Fraction(dp - 1, dp)
    layers, hidden = CONFIG.num_hidden_layers, CONFIG.hidden_size
    tokens = GLOBAL_BATCH // dp * SEQUENCE
    norms = (2 * layers + 1) * hidden
    attention = 2 * hidden * hidden + 2 * CONFIG.num_key_value_heads * CONFIG.head_size * hidden
    matrices = 2 * CONFIG.vocab_size * hidden + layers * (attention + 3 * CONFIG.intermediate_size * hidden)
    over_tp = tokens * hidden * (4 * layers + 2) + 3 * tokens + 1
    if layout.sequence_parallel:
        over_tp += norms // dp if layout.zero1 else norms
    over_dp = matrices // layout.tp + norms + (1 if layout.zero1 else 0)
    return int(2 * 4 * (tp_share * over_tp + dp_share * over_dp))
