"""What a decoder layer of Llama sends between its ranks, and the least that tensor parallelism needs."""

import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_engine.models.llama_config import rotary_tables
from nxd_state import active_group
from processes.over_gloo import over_gloo

from layer_bench.collective_traffic import CollectiveTraffic

SEQUENCE, BATCH = 64, 3
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=4,
)

Traffic = tuple[dict[str, int], int]  # number of collectives by kind, bytes that each rank sends


def decoder_layer_traffic(sequence_parallel: bool, dtype: torch.dtype = torch.float32) -> tuple[Traffic, Traffic]:
    """Of its forward and of its backward. Called on all ranks."""
    tensor_parallel = active_group("tp").size
    model = LlamaForCausalLM(CONFIG, sequence_parallel=sequence_parallel, dtype=dtype)
    length = SEQUENCE // tensor_parallel if sequence_parallel else SEQUENCE
    hidden = torch.randn(length, BATCH, CONFIG.hidden_size, dtype=dtype, requires_grad=True)
    rotary = rotary_tables(torch.arange(SEQUENCE), SEQUENCE, CONFIG, like=hidden)
    with over_gloo(), CollectiveTraffic(tensor_parallel) as forward:
        output = model.model.layers[0](hidden, rotary, None)
    with over_gloo(), CollectiveTraffic(tensor_parallel) as backward:
        output.sum().backward()
    return (dict(forward.number), forward.bytes_sent), (dict(backward.number), backward.bytes_sent)


def least_bytes(tensor_parallel: int, dtype: torch.dtype = torch.float32) -> int:
    """For each direction: two all-reduces of the activations.

    Each can do with no less than a reduce-scatter and an all-gather, for which a rank sends all parts but its own
    (Patarasuk and Yuan 2009).
    """
    activations = SEQUENCE * BATCH * CONFIG.hidden_size * dtype.itemsize
    return 2 * 2 * activations * (tensor_parallel - 1) // tensor_parallel
