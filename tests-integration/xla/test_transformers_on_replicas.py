"""Models of transformers on XLA whose sequences are cut: one graph for all ranks, and the steps of those over gloo."""

import sys
from pathlib import Path

import pytest
from nxd_layers.hf import parallelize
from nxd_testing import run_on_ranks, run_on_replicas
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from steps_on_replicas import assert_same_outcomes, train_and_look
from training_steps import Layout, train

pytestmark = [pytest.mark.xla, pytest.mark.slow]

STEPS = 3


class Qwen3(nn.Module):
    """Takes token ids and labels, and gives the loss."""

    def __init__(self) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
        config = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **sizes)
        self.model = parallelize(Qwen3ForCausalLM(config))

    def forward(self, ids, labels):
        return self.model(input_ids=ids, labels=labels).loss


def make(layout: Layout) -> nn.Module:
    return Qwen3()


@pytest.mark.parametrize("layout", [Layout(tp=1, cp=2), Layout(tp=2, cp=2)], ids=["cp2", "tp2-cp2"])
def test_steps_of_cut_sequences_are_one_graph_and_equal_those_over_gloo(layout):
    ranks = layout.tp * layout.cp

    over_gloo = run_on_ranks(train, ranks, layout, STEPS, make, env={"NXD_DEVICE": "cpu"})
    on_xla = run_on_replicas(train_and_look, ranks, layout, STEPS, make)  # ranks whose graphs differ raise

    assert_same_outcomes([outcome for outcome, _, _ in on_xla], over_gloo)
    for _, is_new, _ in on_xla:
        assert is_new == [True, True, False]  # the second finds the optimizer's state
