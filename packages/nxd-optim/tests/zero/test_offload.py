"""States, gradients and parameters in host memory, on the stand-in for the native `neuron` device."""

import pytest
import torch
from nxd_optim import GradientHistograms, Muon, NeuronZero1Optimizer, StochasticRounding, WeightAverage, fully_shard
from nxd_state import (
    active_group,
    get_device,
    initialize_model_parallel,
    local_values,
    whole_parameters,
)
from nxd_testing import run_on_neuron
from torch import nn

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="the stand-in needs torch 2.13")

WIDTH, STEPS, SAMPLES = 7, 4, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return (hidden * self.scale).square().mean()


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return Model().to(get_device(), dtype)


def take_steps(model, optimizer, *, microbatches=2, every=True):
    replicas = active_group("dp", "cp")
    dtype = model.scale.dtype
    for step in range(STEPS):
        for microbatch in range(microbatches):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            inputs = torch.randn(SAMPLES, WIDTH, generator=generator).chunk(replicas.size)[replicas.rank]
            loss = model(inputs.to(get_device(), dtype)) / microbatches
            if every:
                with optimizer.each_backward(list(model.parameters())):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model):
    with whole_parameters(model.parameters()):
        return {name: it.detach().float().cpu().clone() for name, it in model.named_parameters()}


# Arguments of the optimizer, of `fully_shard` (None without it), of the steps, and the dtype.
CASES = {
    "ZeRO-1": ({}, None, {"every": False}, torch.float32),
    "ZeRO-1, float32 masters of bfloat16": ({}, None, {"every": False}, torch.bfloat16),
    "ZeRO-1, rounded stochastically": ({"optimizer_dtype": torch.bfloat16}, None, {"every": False}, torch.bfloat16),
    "ZeRO-1, accumulated in float32": ({"use_grad_acc_hook": True}, None, {"every": False}, torch.bfloat16),
    "ZeRO-2": ({"shard_gradients": True}, None, {"microbatches": 3}, torch.float32),
    "hybrid": ({"shard_group_size": 1, "shard_gradients": True}, None, {}, torch.float32),
    "ZeRO-3": ({"shard_gradients": True}, {}, {}, torch.float32),
    "ZeRO-3 of bfloat16": ({"shard_gradients": True}, {}, {}, torch.bfloat16),
    "ZeRO-3, kept": ({"shard_gradients": True}, {"reshard_after_forward": False}, {}, torch.float32),
    "ZeRO-3, shared": ({"shard_gradients": True}, {"reshard_after_forward": 2}, {}, torch.float32),
}


def train(case, offload):
    """The weights and the moments, after a step where in the host's memory is what should be there."""
    arguments, sharding, steps, dtype = CASES[case]
    model = make(dtype)
    if sharding is not None:
        fully_shard([model], model.blocks, offload=offload == "parameters", **sharding)
    optimizer = NeuronZero1Optimizer(
        model.parameters(), torch.optim.AdamW, max_norm=0.1, offload=offload == "optimizer", lr=0.02, **arguments
    )
    if "optimizer_dtype" in arguments:
        StochasticRounding(optimizer)
    take_steps(model, optimizer, **steps)
    states = [it for state in optimizer.base_optimizer.state.values() for it in state.values()]
    if offload != "none":
        assert all(it.device.type == "cpu" for it in states)
        assert all(own.weight.device.type == "cpu" for bucket, _ in optimizer.parts() for own in bucket.ranges)
        assert optimizer.base_optimizer.param_groups[0]["fused"]
        assert optimizer.param_groups[0]["fused"] is None
    kept = {local_values(it).device.type for it in model.parameters()}
    assert kept == {"cpu" if offload == "parameters" else get_device().type}
    assert {it.device for it in model.parameters()} == {get_device()}
    norm = optimizer.grad_norm.item()
    return weights_of(model), norm, [it.cpu() for it in states]


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_training_with_offload_equals_that_without(offload):
    cases = [case for case, (_, sharding, *_) in CASES.items() if offload == "optimizer" or sharding is not None]

    def train_all(offload):
        initialize_model_parallel()
        return {case: train(case, offload) for case in cases}

    expected = run_on_neuron(train_all, 2, "none")
    found = run_on_neuron(train_all, 2, offload)

    for of_rank, expected_of_rank in zip(found, expected, strict=True):
        for case in cases:
            assert_close(case, of_rank[case], expected_of_rank[case])


class Norms(nn.Module):
    """A norm whose gradients tensor-parallel ranks sum, as in a sequence-parallel region."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, device=get_device())
        for parameter in self.norm.parameters():
            parameter.sequence_parallel_enabled = True

    def forward(self, inputs):
        return (self.norm(inputs) * inputs).square().mean()


def test_what_reads_gradients_and_states_finds_them_on_the_host():
    def train_it(offload):
        initialize_model_parallel(2)
        torch.manual_seed(0)
        model = Norms()
        if offload == "parameters":
            fully_shard([model], [model.norm], offload=True)
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.AdamW, lr=0.02, shard_gradients=True, offload=offload == "optimizer"
        )
        counts = []
        if offload != "none":  # the device does not count
            GradientHistograms(optimizer, model.named_parameters(), lambda _, found: counts.append(found))
        average = WeightAverage(model.parameters(), 0.5)
        for step in range(STEPS):
            inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
            rows = inputs.chunk(4)[torch.distributed.get_rank()].to(get_device())
            with optimizer.each_backward(list(model.parameters())):
                model(rows).backward()
            optimizer.step()
            average.update()
        with average.applied():
            averaged = weights_of(model)
        counted = [sum(it.elements for it in found.values()) for found in counts]
        return averaged, counted, optimizer.memory_report()

    outcomes = {offload: run_on_neuron(train_it, 4, offload) for offload in ("none", "optimizer", "parameters")}

    for offload in ("optimizer", "parameters"):
        for (averaged, counted, report), (expected, *_) in zip(outcomes[offload], outcomes["none"], strict=True):
            torch.testing.assert_close(averaged, expected, rtol=1e-5, atol=1e-7)
            assert counted == STEPS * [2 * WIDTH]
            on_host = ["mean gradients", "master weights", "state"]
            expected_rows = on_host if offload == "optimizer" else ["parameters", *on_host]
            rows = [row[:16].strip() for row in str(report).splitlines() if row.endswith("in host memory")]
            assert rows == expected_rows


def test_weights_loaded_with_masters_of_a_narrower_dtype_are_kept():
    def load():
        initialize_model_parallel()
        model = make()
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.SGD, offload=True, save_master_weights=True, lr=0.0
        )
        for parameter in model.parameters():
            parameter.detach().fill_(1.0)
        optimizer.allocate_state(lambda parameter: {"master_weight": (torch.float32, tuple(parameter.shape))})
        optimizer.finish_loading({})
        model(torch.ones(2, WIDTH, device=get_device())).backward()
        optimizer.step()
        return weights_of(model)

    for weights in run_on_neuron(load, 2):
        assert all(torch.equal(it, torch.ones_like(it)) for it in weights.values())


def test_gradients_travel_apart_from_the_messages_of_experts(run_ranks):
    def groups():
        initialize_model_parallel(expert_model_parallel_size=2)
        model = make()
        optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        assert active_group("dp", "cp").process_group is active_group("ep").process_group
        return optimizer.placements[0].replicas.process_group is active_group("ep").process_group

    assert run_ranks(groups, 2) == [False, False]


def test_an_optimizer_that_needs_whole_matrices_refuses():
    def make_it():
        initialize_model_parallel()
        model = make()
        with pytest.raises(ValueError, match=r"Muon exchanges parts of matrices on the device.*use offload=False"):
            NeuronZero1Optimizer([model.blocks[0][0].weight], Muon, offload=True)

    run_on_neuron(make_it, 2)


def assert_close(case, found, expected):
    """Fused and plain kernels differ by rounding, which a bfloat16 weight may amplify to its last bit."""
    rtol = 1e-2 if CASES[case][-1] == torch.bfloat16 else 1e-5
    weights, norm, states = found
    weights_expected, norm_expected, states_expected = expected
    assert norm == pytest.approx(norm_expected, rel=rtol)
    for name, it in weights_expected.items():
        torch.testing.assert_close(weights[name], it, rtol=rtol, atol=rtol / 100, msg=lambda text: f"{case}: {text}")
    for state, it in zip(states, states_expected, strict=True):
        torch.testing.assert_close(state, it, rtol=rtol, atol=rtol / 1000, msg=lambda text: f"{case}: {text}")
