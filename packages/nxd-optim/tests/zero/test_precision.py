"""Half-precision parameters: master weights, accumulation and reduction in float32."""

import pytest
import torch
from nxd_optim.zero import MASTER_KEY, NeuronZero1Optimizer
from nxd_state import active_group, initialize_model_parallel
from torch import nn

SMALL = 2.0**-9  # added to 1 it is lost in bfloat16


def bfloat16_parameter(*shape, value=1.0):
    return nn.Parameter(torch.full(shape, value, dtype=torch.bfloat16))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_master_weights_train_as_float32_parameters_do_on_the_same_gradients(run_ranks, half):
    def gradients(step):
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(shape, generator=generator).to(half) for shape in ((5, 3), (7,))]

    def make(dtype):
        generator = torch.Generator().manual_seed(100)
        return [nn.Parameter(torch.randn(shape, generator=generator).to(half).to(dtype)) for shape in ((5, 3), (7,))]

    def train():
        initialize_model_parallel()
        parameters = make(half)
        optimizer = NeuronZero1Optimizer(
            parameters, torch.optim.AdamW, grad_clipping=False, save_master_weights=True, lr=1e-3
        )
        for step in range(20):
            for parameter, gradient in zip(parameters, gradients(step), strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        indices = {id(p): index for index, p in enumerate(parameters)}
        masters = {
            (indices[id(entry.parameter)], shard.box): shard.tensor.clone()
            for entry in optimizer.sharded_state()
            if entry.key == MASTER_KEY
            for shard in entry.shards
        }
        return [p.detach() for p in parameters], masters

    results = run_ranks(train, 2)

    expected = make(torch.float32)
    optimizer = torch.optim.AdamW(expected, lr=1e-3)
    for step in range(20):
        for parameter, gradient in zip(expected, gradients(step), strict=True):
            parameter.grad = gradient.float()
        optimizer.step()
    for parameters, masters in results:
        for found, weight in zip(parameters, expected, strict=True):
            assert torch.equal(found, weight.detach().to(half))
        for (index, box), master in masters.items():
            torch.testing.assert_close(master, expected[index].detach()[box.slices], rtol=1e-6, atol=1e-7)
    assert sum(master.numel() for _, masters in results for master in masters.values()) == 5 * 3 + 7


def test_float64_parameters_are_not_rounded_by_the_default_dtype():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = NeuronZero1Optimizer([parameter], torch.optim.SGD, grad_clipping=False, lr=1.0)
    parameter.grad = torch.full((3,), 1e-12, dtype=torch.float64)

    optimizer.step()

    assert parameter.tolist() == [1 - 1e-12] * 3


def test_optimizer_in_bfloat16_keeps_no_master_weights():
    parameter = bfloat16_parameter(3)
    optimizer = NeuronZero1Optimizer(
        [parameter], torch.optim.SGD, torch.bfloat16, grad_clipping=False, save_master_weights=True, lr=SMALL
    )
    for _ in range(4):
        parameter.grad = -torch.ones_like(parameter)
        optimizer.step()

    assert parameter.tolist() == [1.0] * 3  # each update is lost
    assert optimizer.sharded_state() == []


@pytest.mark.parametrize("accumulate_in_float32", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_accumulated_in_float32_when_asked(run_ranks, accumulate_in_float32, overlap):
    def train():
        initialize_model_parallel()
        parameter = bfloat16_parameter(3, value=0.0)
        optimizer = NeuronZero1Optimizer(
            [parameter],
            torch.optim.SGD,
            grad_clipping=False,
            use_grad_acc_hook=accumulate_in_float32,
            save_master_weights=True,
            lr=1.0,
            maximize=True,
        )
        for microbatch in range(5):
            if overlap and microbatch == 4:
                with optimizer.overlap_backward():
                    (parameter * SMALL).sum().backward()
            else:
                (parameter * (SMALL if microbatch else 1.0)).sum().backward()
            assert (parameter.grad is None) == (accumulate_in_float32 or (overlap and microbatch == 4))
        optimizer.step()
        return [s.tensor.tolist() for entry in optimizer.sharded_state() for s in entry.shards]

    expected = 1 + 4 * SMALL if accumulate_in_float32 else 1.0
    found = [value for shards in run_ranks(train, 2) for shard in shards for value in shard]
    assert found == [expected] * 3


def test_gradients_accumulated_in_float32_are_dropped_by_zero_grad():
    parameter = bfloat16_parameter(2, value=0.0)
    optimizer = NeuronZero1Optimizer(
        [parameter], torch.optim.SGD, grad_clipping=False, use_grad_acc_hook=True, lr=1.0, maximize=True
    )
    for set_to_none in (True, False):
        parameter.sum().backward()
        optimizer.zero_grad(set_to_none)
    (3 * parameter).sum().backward()

    optimizer.step()

    assert parameter.tolist() == [3.0, 3.0]


def test_half_precision_gradients_are_averaged_in_float32(run_ranks):
    def train():
        initialize_model_parallel()
        parameter = bfloat16_parameter(4, value=0.0)
        optimizer = NeuronZero1Optimizer(
            [parameter],
            torch.optim.SGD,
            grad_clipping=False,
            higher_cc_precision=True,
            save_master_weights=True,
            lr=1.0,
            maximize=True,
        )
        parameter.grad = torch.full_like(parameter, SMALL if active_group("dp").rank else 1.0)
        optimizer.step()
        return [s.tensor.tolist() for entry in optimizer.sharded_state() for s in entry.shards]

    assert run_ranks(train, 4) == [[[(1 + 3 * SMALL) / 4]]] * 4


def test_parameters_of_several_dtypes_train_together(run_ranks):
    def train():
        initialize_model_parallel()
        parameters = [bfloat16_parameter(3), nn.Parameter(torch.ones(5)), bfloat16_parameter(2, 2)]
        optimizer = NeuronZero1Optimizer(parameters, torch.optim.SGD, grad_clipping=True, max_norm=12**0.5, lr=1.0)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step()
        return float(optimizer.grad_norm), [p.dtype for p in parameters], [p.flatten()[0].item() for p in parameters]

    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
    expected = pytest.approx([0.0] * 3, abs=1e-5)
    assert run_ranks(train, 2) == [(pytest.approx(48**0.5), dtypes, expected)] * 2


def test_master_weights_follow_parameters_that_somebody_has_loaded():
    parameter = bfloat16_parameter(2)
    optimizer = NeuronZero1Optimizer([parameter], torch.optim.SGD, grad_clipping=False, lr=1.0)
    with torch.no_grad():
        parameter.fill_(5.0)

    optimizer.refresh_master_weights()

    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter.tolist() == [4.0, 4.0]
