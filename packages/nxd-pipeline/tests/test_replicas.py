"""Gradients of a pipeline's replicas: averaged by `run_train` where no optimizer is known to do it."""

import copy

import pytest
import torch
from nxd_pipeline import NxDPPModel
from nxd_state import get_group, initialize_model_parallel
from torch import nn
from torch.nn import functional as F

WIDTH, ROWS = 4, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def make_model():
    torch.manual_seed(0)
    return Model().double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for name in ("x", "y")}


def gradients_of_replica(pp, flags, accumulates):
    initialize_model_parallel(1, pp)
    model = NxDPPModel(make_model(), transformer_layer_cls=Layer, num_microbatches=2, auto_partition=True, **flags)
    replicas = get_group("dp")
    own = {name: it.chunk(replicas.size)[replicas.rank] for name, it in batch().items()}
    if accumulates:
        with model.no_sync():
            model.run_train(**own)
    model.run_train(**own)
    return {name: it.grad for name, it in model.local_named_parameters()}


def gradients_of_one_process(rows=slice(None)):
    model = make_model()
    model(**{name: it[rows] for name, it in batch().items()}).backward()
    return {name: it.grad for name, it in model.named_parameters()}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_are_those_of_one_process_with_the_whole_batch(run_ranks, pp, accumulates):
    expected = gradients_of_one_process()

    for found in run_ranks(gradients_of_replica, 2 * pp, pp, {}, accumulates):
        for name, gradient in found.items():
            if "unused" in name:
                assert gradient is None
            else:
                torch.testing.assert_close(gradient, expected[name] * (1 + accumulates), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("flag", ["use_zero1_optimizer", "use_optimizer_wrapper"])
def test_gradients_stay_with_their_replica_where_the_optimizer_averages_them(run_ranks, flag):
    parts = run_ranks(gradients_of_replica, 2, 1, {flag: True}, False)

    for rank, found in enumerate(parts):
        expected = gradients_of_one_process(slice(rank * ROWS // 2, (rank + 1) * ROWS // 2))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Sometimes(nn.Module):
    """Of two layers only the first replica uses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return (self.second(self.first(x)) if get_group("dp").rank == 0 else self.first(x)).sum()


def gradients_where_one_replica_uses_a_layer():
    initialize_model_parallel()
    torch.manual_seed(0)
    model = NxDPPModel(Sometimes(), num_microbatches=1)
    alone = copy.deepcopy(model.original_torch_module)
    x = torch.ones(2, WIDTH)
    model.run_train(x=x)
    alone(x).backward()
    return model.original_torch_module.second.weight.grad, alone.second.weight.grad


def test_a_gradient_that_some_replicas_have_is_averaged_with_zeros_of_the_others(run_ranks):
    (first, alone), (second, none) = run_ranks(gradients_where_one_replica_uses_a_layer, 2)

    assert none is None
    torch.testing.assert_close(first, alone / 2)
    torch.testing.assert_close(second, alone / 2)


@pytest.mark.parametrize("pp", [1, 2])
def test_replicas_that_start_differently_are_refused_on_every_rank(run_ranks, pp):
    def outcome():
        initialize_model_parallel(1, pp)
        torch.manual_seed(get_group("dp").rank)
        model = NxDPPModel(Model(), transformer_layer_cls=Layer, num_microbatches=2, auto_partition=True)
        x = {name: it.float() for name, it in batch().items()}
        with pytest.raises(ValueError, match="start from different weights") as raised:
            model.run_train(**x)
        for parameter in model.local_parameters():
            parameter.data.fill_(0.1)
        model.run_train(**x)
        return str(raised.value)

    assert len(set(run_ranks(outcome, 2 * pp))) == 1
