"""Weights at initialisation: those of torch's own layers, at every tensor-parallel degree."""

import pytest
import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RMSNorm, RowParallelLinear
from nxd_state import get_shard_spec, move_model_to_device
from torch import nn

SEED = 5


def linear():
    torch.manual_seed(SEED)
    return nn.Linear(24, 72)


def embedding():
    torch.manual_seed(SEED)
    return nn.Embedding(24, 72, padding_idx=7)


# Each parallel layer, its arguments, and torch's layer of the same sizes.
LAYERS = {
    "column": (ColumnParallelLinear, (24, 72), {}, linear),
    "column, stride 2": (ColumnParallelLinear, (24, 72), {"stride": 2}, linear),
    "row": (RowParallelLinear, (24, 72), {}, linear),
    "embedding": (ParallelEmbedding, (24, 72), {"padding_idx": 7}, embedding),
    "embedding across": (ParallelEmbedding, (24, 72), {"padding_idx": 7, "shard_across_embedding": True}, embedding),
}


def build(name, **more):
    kind, sizes, arguments, _ = LAYERS[name]
    torch.manual_seed(SEED)
    return kind(*sizes, **arguments, **more)


def assert_weights_of(expected, layer, logical, *, dtype=torch.float32):
    parameters, wanted = dict(layer.named_parameters()), dict(expected.named_parameters())
    assert parameters.keys() == wanted.keys()
    for name, parameter in parameters.items():
        assert torch.equal(logical(parameter), wanted[name].detach().to(dtype))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_weights_are_those_of_torch_at_every_degree(on_tp, logical, tp, name):
    def job():
        layer = build(name)
        state_after = torch.get_rng_state()
        assert_weights_of(LAYERS[name][3](), layer, logical)
        assert torch.equal(torch.get_rng_state(), state_after)  # the random state has moved on as torch's does

    on_tp(tp, job)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_other_dtypes_are_the_float32_ones_rounded(on_tp, logical, name, dtype):
    def job():
        layer = build(name, dtype=dtype)
        assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
        assert_weights_of(LAYERS[name][3](), layer, logical, dtype=dtype)

    on_tp(2, job)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_by_way_of_the_meta_device_are_those_built_directly(on_tp, logical, tp, name):
    def job():
        with torch.device("meta"):
            layer = build(name)
        state = torch.get_rng_state()
        torch.manual_seed(SEED)
        assert torch.equal(state, torch.get_rng_state())  # nothing was drawn
        specs = [get_shard_spec(parameter) for parameter in layer.parameters()]

        move_model_to_device(layer, "cpu")
        layer.reset_parameters()

        assert [get_shard_spec(parameter) for parameter in layer.parameters()] == specs
        assert_weights_of(LAYERS[name][3](), layer, logical)

    on_tp(tp, job)


@pytest.mark.parametrize("name", LAYERS)
def test_device_meta_as_an_argument_draws_nothing(on_tp, name):
    def job():
        layer = build(name, device="meta")
        state = torch.get_rng_state()
        torch.manual_seed(SEED)
        assert all(parameter.is_meta for parameter in layer.parameters())
        assert torch.equal(state, torch.get_rng_state())

    on_tp(2, job)


def test_model_by_way_of_the_meta_device_equals_one_built_directly(on_tp):
    def make():
        torch.manual_seed(SEED)
        return nn.Sequential(ParallelEmbedding(8, 6), RMSNorm(6), ColumnParallelLinear(6, 4))

    def job():
        direct = make()
        with torch.device("meta"):
            model = make()
        move_model_to_device(model, "cpu")
        for module in model:
            module.reset_parameters()
        for parameter, expected in zip(model.parameters(), direct.parameters(), strict=True):
            assert torch.equal(parameter, expected)

    on_tp(2, job)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_init_method_fills_the_whole_weight(on_tp, logical, tp):
    def count(weight):
        weight.copy_(torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape))

    def job():
        layers = [
            ColumnParallelLinear(4, 8, init_method=count),
            RowParallelLinear(4, 8, init_method=count),
            ParallelEmbedding(8, 4, count),
        ]
        for layer in layers:
            assert torch.equal(logical(layer.weight), torch.arange(32.0).view(8, 4))

    on_tp(tp, job)


@pytest.mark.parametrize("name", LAYERS)
def test_random_state_moves_on_alike_on_every_rank(on_tp, name):
    def job():
        build(name)
        return torch.rand(3)

    draws = on_tp(4, job)
    assert all(torch.equal(draw, draws[0]) for draw in draws)


@pytest.mark.parametrize("name", LAYERS)
def test_weights_do_not_depend_on_the_default_dtype(on_tp, logical, name):
    def job():
        torch.set_default_dtype(torch.float64)
        layer = build(name)
        torch.set_default_dtype(torch.float32)
        assert_weights_of(LAYERS[name][3](), layer, logical)

    on_tp(2, job)
