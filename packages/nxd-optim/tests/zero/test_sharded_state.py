"""`sharded_state` gives all states as logical tensors, and they can be filled at another layout."""

import pytest
import torch
from nxd_optim.zero import MASTER_KEY, NeuronZero1Optimizer
from nxd_state import initialize_model_parallel
from torch import nn


def make(small_model, optimizer_name="AdamW", dtype=torch.float64):
    parameters = small_model.make_parameters(dtype)
    optimizer_class, arguments = small_model.optimizer_arguments(optimizer_name)
    optimizer = NeuronZero1Optimizer(
        small_model.grouped(parameters), optimizer_class, save_master_weights=True, grad_clipping=False, **arguments
    )
    return parameters, optimizer


def shards_of(parameters, optimizer):
    """(name, key), logical shape, box and values of every shard; scalars have no box."""
    names = {id(p): name for name, p in parameters.items()}
    return [
        ((names[id(entry.parameter)], entry.key), shard.logical_shape, shard.box.slices, shard.tensor.clone())
        for entry in optimizer.sharded_state()
        for shard in entry.shards
    ] + [
        ((names[id(entry.parameter)], entry.key), (), (), entry.scalar.clone())
        for entry in optimizer.sharded_state()
        if entry.scalar is not None
    ]


def assemble(shards_by_rank):
    wholes, seen = {}, {}
    for shards in shards_by_rank:
        for name, shape, index, values in shards:
            wholes.setdefault(name, torch.zeros(shape, dtype=values.dtype))[index] = values
            seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))[index] = True
    assert all(each.all() for each in seen.values())
    return wholes


def save_states(small_model, optimizer_name, tp, dtype):
    initialize_model_parallel(tp)
    parameters, optimizer = make(small_model, optimizer_name, dtype)
    for step in range(3):
        small_model.take_step(optimizer, parameters, step)
    return shards_of(parameters, optimizer)


@pytest.mark.parametrize("optimizer_name", ["AdamW", "SGD"])
@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (4, 1), (4, 2)])
def test_states_are_those_of_the_unsharded_optimizer(run_ranks, small_model, optimizer_name, ranks, tp):
    found = assemble(run_ranks(save_states, ranks, small_model, optimizer_name, tp, torch.float64))

    parameters = small_model.make_parameters()
    optimizer_class, arguments = small_model.optimizer_arguments(optimizer_name)
    optimizer = optimizer_class(small_model.grouped(parameters), **arguments)
    for step in range(3):
        for microbatch in range(3):
            (small_model.loss_of(parameters, step, microbatch, range(4)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {(name, key): value for name, p in parameters.items() for key, value in optimizer.state[p].items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        unpadded = value[:10] if name[0] == "vocabulary" and value.dim() else value
        torch.testing.assert_close(found[name], unpadded, rtol=1e-12, atol=1e-14)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (1, 1), (4, 4)])
def test_states_saved_at_one_layout_are_filled_at_another(run_ranks, small_model, ranks, tp, dtype):
    saved = assemble(run_ranks(save_states, 4, small_model, "fused AdamW", 2, dtype))

    def load():
        initialize_model_parallel(tp)
        parameters, optimizer = make(small_model, "fused AdamW", dtype)
        names = {id(p): name for name, p in parameters.items()}

        def stored(parameter):
            mine = {key: value for (name, key), value in saved.items() if name == names[id(parameter)]}
            return {key: (value.dtype, tuple(value.shape)) for key, value in mine.items() if key != "step"} | {
                "step": (torch.float32, ())
            }

        optimizer.allocate_state(stored)
        for entry in optimizer.sharded_state():
            whole = saved[names[id(entry.parameter)], entry.key]
            for shard in entry.shards:
                shard.tensor.copy_(whole[shard.box.slices])
            if entry.scalar is not None:
                entry.scalar.copy_(whole)
        return shards_of(parameters, optimizer)

    found = assemble(run_ranks(load, ranks))

    assert found.keys() == saved.keys()
    assert any(key == MASTER_KEY for _, key in saved) == (dtype == torch.bfloat16)
    for name, value in saved.items():
        assert torch.equal(found[name], value)


def master_weights(optimizer):
    return [s.tensor.tolist() for e in optimizer.sharded_state() if e.key == MASTER_KEY for s in e.shards]


@pytest.mark.parametrize("save_master_weights", [True, False])
def test_master_weights_that_a_checkpoint_lacks_are_those_of_the_parameters_at_the_next_step(save_master_weights):
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = NeuronZero1Optimizer(
        [parameter], torch.optim.SGD, grad_clipping=False, save_master_weights=save_master_weights, lr=1.0
    )

    optimizer.allocate_state(lambda _: {})
    asked_for = master_weights(optimizer)
    with torch.no_grad():
        parameter.fill_(5.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    assert asked_for == []
    assert parameter.tolist() == [4.0] * 3
    assert master_weights(optimizer) == ([[4.0] * 3] if save_master_weights else [])


def test_master_weights_of_a_checkpoint_are_not_replaced_by_the_parameters():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = NeuronZero1Optimizer(
        [parameter], torch.optim.SGD, grad_clipping=False, save_master_weights=True, lr=1.0
    )
    optimizer.allocate_state(lambda _: {})
    optimizer.allocate_state(lambda p: {MASTER_KEY: (torch.float32, tuple(p.shape))})
    (entry,) = optimizer.sharded_state()
    entry.shards[0].tensor.fill_(1 + 2**-9)  # which bfloat16 cannot hold
    parameter.grad = torch.zeros_like(parameter)

    optimizer.step()

    assert master_weights(optimizer) == [[1 + 2**-9] * 3]


def test_state_that_is_neither_tensor_nor_number_raises():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["count"] = "one"

    parameter = nn.Parameter(torch.ones(3))
    optimizer = NeuronZero1Optimizer([parameter], Counting)
    parameter.sum().backward()
    optimizer.step()

    with pytest.raises(ValueError, match=r"state 'count' of a parameter of shape \(3,\) is a str; only tensors"):
        optimizer.sharded_state()
