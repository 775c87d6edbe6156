"""Mixtures of experts on XLA, over ranks: one graph for all of them, and the steps of those over gloo."""

import functools
import sys
from pathlib import Path

import pytest
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, parallel_cross_entropy
from nxd_layers.experts import ExpertMLPs, MoE, RouterTopK
from nxd_layers.hf import parallelize
from nxd_state import splits_experts
from nxd_testing import run_on_ranks, run_on_replicas
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from steps_on_replicas import assert_same_outcomes, train_and_look
from training_steps import Layout, train

pytestmark = [pytest.mark.xla, pytest.mark.slow]

STEPS = 3
HIDDEN, INNER, EXPERTS, CHOSEN, VOCABULARY = 24, 16, 4, 2, 64


class OwnLayer(nn.Module):
    """An embedding, our mixture of experts, and a head; takes token ids and labels, and gives the loss."""

    def __init__(self, capacity_factor: float | None) -> None:
        super().__init__()
        self.embedding = ParallelEmbedding(VOCABULARY, HIDDEN)
        experts = ExpertMLPs(EXPERTS, CHOSEN, HIDDEN, INNER, capacity_factor=capacity_factor)
        self.moe = MoE(RouterTopK(EXPERTS, CHOSEN, HIDDEN), experts, sequence_dimension=1)
        self.head = ColumnParallelLinear(HIDDEN, VOCABULARY, gather_output=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        (mixed,) = self.moe(hidden)
        return parallel_cross_entropy(self.head(hidden + mixed), labels).mean()


class Mixtral(nn.Module):
    """The same of transformers, with its own mixture."""

    def __init__(self) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__()
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=INNER,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=EXPERTS,
            max_position_embeddings=64,
        )
        self.model = parallelize(MixtralForCausalLM(config), expert_parallel=splits_experts())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels, use_cache=False).loss


MODELS = {
    "ours": functools.partial(OwnLayer, None),
    "ours-dropping": functools.partial(OwnLayer, 1.0),
    "mixtral": Mixtral,
}
LAYOUTS = {
    "ep2": (2, Layout(tp=1, ep=2)),
    "ep2-zero1": (2, Layout(tp=1, ep=2, zero1=True)),
    "ep2-over-tp2": (2, Layout(tp=2, ep=2, etp=1)),
    "ep2-tp2": (4, Layout(tp=2, ep=2)),
    "ep2-dp2": (4, Layout(tp=1, ep=2)),
}


def make(name: str, layout: Layout) -> nn.Module:
    return MODELS[name]()


@pytest.mark.parametrize(
    ("name", "layout_name"),
    [
        *(("ours", layout_name) for layout_name in LAYOUTS),
        ("ours-dropping", "ep2"),
        ("mixtral", "ep2"),
        ("mixtral", "ep2-over-tp2"),
    ],
)
def test_steps_of_experts_on_several_ranks_are_one_graph_and_equal_those_over_gloo(name, layout_name):
    world_size, layout = LAYOUTS[layout_name]
    model = functools.partial(make, name)

    over_gloo = run_on_ranks(train, world_size, layout, STEPS, model, env={"NXD_DEVICE": "cpu"})
    on_xla = run_on_replicas(train_and_look, world_size, layout, STEPS, model)  # ranks whose graphs differ raise

    assert_same_outcomes([outcome for outcome, _, _ in on_xla], over_gloo)
    for _, is_new, _ in on_xla:
        assert is_new == [True, True, False]  # the second finds the optimizer's state
