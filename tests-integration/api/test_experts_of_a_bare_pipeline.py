"""Gradients of experts over ranks in a bare `NxDPPModel`: right by a reducer, refused where nobody averages them."""

import pytest
import torch
from nxd_layers.experts import ExpertMLPs, MoE, RouterTopK
from nxd_optim import GradientReducer
from nxd_pipeline import NxDPPModel
from nxd_state import get_group, initialize_model_parallel
from torch import nn

EXPERTS, HIDDEN = 4, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        router = RouterTopK(EXPERTS, 2, HIDDEN, dtype=torch.float64)
        self.moe = MoE(router, ExpertMLPs(EXPERTS, 2, HIDDEN, 12, dtype=torch.float64))

    def forward(self, x):
        return self.moe(x)[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def gradients(ep, accumulates):
    """Of this rank, and the number of its expert-parallel part."""
    initialize_model_parallel(1, 1, ep)
    torch.manual_seed(3)
    model = NxDPPModel(Model(), transformer_layer_cls=Layer, num_microbatches=1, use_optimizer_wrapper=True)
    replicas = get_group("dp")
    generator = torch.Generator().manual_seed(1)
    for number in range(1 + accumulates):
        x = torch.randn(6, 4, HIDDEN, generator=generator, dtype=torch.float64)
        own = x.chunk(replicas.size, dim=1)[replicas.rank].contiguous()
        if accumulates and number == 0:
            with model.no_sync():
                model.run_train(x=own)
        else:
            model.run_train(x=own)
    GradientReducer(model.local_parameters()).finish()
    return replicas.rank % ep, {name: it.grad for name, it in model.local_named_parameters()}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process_with_the_whole_batch(run_ranks, ranks, accumulates):
    _, expected = run_ranks(gradients, 1, 1, accumulates)[0]

    for part, found in run_ranks(gradients, ranks, 2, accumulates):
        for name, gradient in found.items():
            whole = expected[name]
            own = whole if gradient.shape == whole.shape else whole.chunk(2)[part]
            torch.testing.assert_close(gradient, own, rtol=1e-10, atol=1e-13)


def refusal():
    initialize_model_parallel(1, 1, 2)
    model = NxDPPModel(Model(), transformer_layer_cls=Layer, num_microbatches=1)
    x = torch.zeros(6, 4, HIDDEN, dtype=torch.float64)
    with pytest.raises(ValueError, match="no optimizer averages the gradients of experts") as error:
        model.run_train(x=x)
    with model.no_sync():
        model.run_train(x=x)  # only accumulates
    return str(error.value)


def test_experts_whose_gradients_nobody_averages_are_refused_on_all_ranks(run_ranks):
    for told in run_ranks(refusal, 2):
        assert "NxDPPModel(use_optimizer_wrapper=True)" in told
