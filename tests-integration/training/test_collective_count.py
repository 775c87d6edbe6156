"""How much a training step communicates, counted: no more than the method needs."""

from collections import Counter

import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_state import initialize_model_parallel

LAYERS = 4
OVER_GLOO = {"NXD_SHM": "0"}  # collectives through shared memory are no operations of torch that could be counted


def count_collectives(sequence_parallel: bool) -> Counter[str]:
    """Collectives of a forward and backward at TP 2, by kind."""
    initialize_model_parallel(tensor_model_parallel_size=2)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config, sequence_parallel=sequence_parallel)
    counts: Counter[str] = Counter()
    with torch.profiler.profile() as profile:
        model(torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)).backward()
    for event in profile.events():
        if event.name.startswith("c10d::"):
            counts[event.name.removeprefix("c10d::").rstrip("_")] += 1
    return counts


def test_training_step_at_tp2_makes_twenty_all_reduces(run_ranks):
    for counts in run_ranks(count_collectives, 2, False, env=OVER_GLOO):
        # Embedding, two per layer forward, two per layer backward, head backward, two in the loss.
        assert counts == {"allreduce": 1 + 2 * LAYERS + 2 * LAYERS + 1 + 2}


def test_training_step_with_sequence_parallel_pairs_gathers_and_scatters(run_ranks):
    for counts in run_ranks(count_collectives, 2, True, env=OVER_GLOO):
        assert counts.pop("allreduce") == 2  # the loss
        # Each all-reduce becomes a gather one way and a scatter the other way.
        assert sum(counts.values()) == 2 * (1 + 2 * LAYERS + 2 * LAYERS + 1)
