"""Histograms of gradients count each element of the logical model once, whatever the layout."""

import pytest
import torch
from nxd_optim import SMALLEST_EXPONENT, GradientHistograms, NeuronZero1Optimizer, gradient_histograms
from nxd_state import fuse_along, get_group, initialize_model_parallel, set_shard_spec, shard_along
from torch import nn


def with_gradient(gradient):
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def test_histogram_counts_by_power_of_two():
    gradient = torch.tensor([1.0, -1.5, 1.99, 2.0, 0.5, 0.0, float("inf"), float("nan")])

    histogram = gradient_histograms([("w", with_gradient(gradient))])["w"]

    counts = {SMALLEST_EXPONENT + i: int(n) for i, n in enumerate(histogram.counts) if n}
    assert counts == {0: 3, 1: 1, -1: 1}
    assert (histogram.zeros, histogram.nonfinite, histogram.elements) == (1, 2, 8)


def test_histogram_of_half_precision_and_extreme_magnitudes_loses_no_element():
    gradient = torch.tensor([1e-7, 65504.0, 1e-4], dtype=torch.float16)
    tiny = torch.tensor([1e-300, 1e300], dtype=torch.float64)

    histograms = gradient_histograms([("half", with_gradient(gradient)), ("double", with_gradient(tiny))])

    assert histograms["half"].elements == 3
    assert histograms["half"].zeros == 0
    assert histograms["double"].counts[0] == 1
    assert histograms["double"].counts[-1] == 1


def test_histogram_leaves_out_parameters_without_gradient():
    assert gradient_histograms([("frozen", nn.Parameter(torch.zeros(2)))]) == {}


@pytest.mark.parametrize("size", [2, 4])
def test_histogram_over_ranks_is_that_of_the_logical_gradient(run_ranks, size):
    generator = torch.Generator().manual_seed(1)
    column = torch.randn(8, 3, generator=generator)
    key = torch.randn(4, 3, generator=generator)
    norm = torch.randn(5, generator=generator)
    padded = torch.randn(5, 3, generator=generator)

    def local(spec, *logical):
        parameter = nn.Parameter(torch.zeros(spec.local_shape))
        parameter.grad = torch.full(spec.local_shape, 1e9)  # what stands in the padding must not count
        by_name = dict(zip(("q", "k") if len(logical) > 1 else ("",), logical, strict=True))
        spec.copy_from_logical(by_name, parameter.grad)
        set_shard_spec(parameter, spec)
        return parameter

    def count():
        initialize_model_parallel(tensor_model_parallel_size=size)
        rank = get_group("tp").rank
        fused = fuse_along(
            [
                shard_along((8, 3), 0, rank=rank, size=size, name="q"),
                shard_along((4, 3), 0, rank=rank // 2, size=size // 2, copies=2, name="k"),
            ],
            0,
        )
        parameters = [
            ("qk", local(fused, column, key)),
            ("padded", local(shard_along((5, 3), 0, rank=rank, size=size, padded_length=8), padded)),
            ("norm", with_gradient(norm.clone())),
        ]
        return gradient_histograms(parameters)

    expected = gradient_histograms(
        [
            ("qk", with_gradient(torch.cat([column, key]))),
            ("padded", with_gradient(padded)),
            ("norm", with_gradient(norm)),
        ]
    )
    for histograms in run_ranks(count, size):
        for name, histogram in expected.items():
            assert torch.equal(histograms[name].counts, histogram.counts)
            assert histograms[name].elements == histogram.elements


def test_histograms_hook_reports_every_so_many_steps():
    reports = []
    weight = with_gradient(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    GradientHistograms(
        optimizer, [("w", weight)], lambda step, found: reports.append((step, found["w"].elements)), every=2
    )

    for _ in range(5):
        optimizer.step()

    assert reports == [(2, 3), (4, 3)]


@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 1), (4, 2)])
def test_histograms_with_zero1_are_of_the_mean_gradients_on_all_ranks(run_ranks, size, tp):
    def train():
        initialize_model_parallel(tensor_model_parallel_size=tp)
        split = nn.Parameter(torch.zeros(6 // tp, 3))
        if tp > 1:
            set_shard_spec(split, shard_along((6, 3), 0, rank=get_group("tp").rank, size=tp))
        whole = nn.Parameter(torch.zeros(5))
        reports = []
        optimizer = NeuronZero1Optimizer([split, whole], torch.optim.SGD, lr=1.0)
        named = [("split", split), ("whole", whole)]
        GradientHistograms(optimizer, named, lambda step, found: reports.append((step, found)), every=2)
        replica = get_group("dp").rank
        for _ in range(2):
            with optimizer.overlap_backward():
                ((split.sum() + whole.sum()) * (1 + 2 * replica)).backward()
            optimizer.step()
        return [(step, {name: one.counts for name, one in found.items()}) for step, found in reports]

    mean = 1 if size == tp else 2  # of 1 and 3
    for ((step, counts),) in run_ranks(train, size):
        assert step == 2
        for name, elements in (("split", 18), ("whole", 5)):
            assert int(counts[name][mean.bit_length() - 1 - SMALLEST_EXPONENT]) == elements
            assert int(counts[name].sum()) == elements


def test_histograms_hook_of_no_step_raises():
    optimizer = torch.optim.SGD([with_gradient(torch.ones(1))], lr=0.1)

    with pytest.raises(ValueError, match="every=0 must be 1 or more"):
        GradientHistograms(optimizer, [], print, every=0)
