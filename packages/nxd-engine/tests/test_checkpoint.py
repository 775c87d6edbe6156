"""The bridge: parameters and optimizer state as logical tensors that share memory with them."""

import copy

import pytest
import torch
from nxd_ckpt import ShardedTensor
from nxd_engine.checkpoints.optimizer_state import allocate_optimizer_state, optimizer_state
from nxd_engine.checkpoints.state import logical_name, model_state
from nxd_state import fuse_along, set_shard_spec, shard_along
from torch import nn


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("mask", torch.ones(2), persistent=False)


class FusedAttention(nn.Module):
    """A fused weight of two logical tensors, as rank 1 of 2 holds it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Module()
        self.attention.qk_proj = nn.Linear(3, 6, bias=False)
        query = shard_along((8, 3), 0, rank=1, size=2, name="q_proj.weight")
        key = shard_along((2, 3), 0, rank=0, size=1, copies=2, name="k_proj.weight")
        set_shard_spec(self.attention.qk_proj.weight, fuse_along([query, key], 0))


def test_model_state_tied_parameter_appears_once_under_its_first_name():
    state = model_state(TiedModel())

    assert set(state) == {"embedding.weight", "scale"}


def test_model_state_fused_parameter_becomes_its_logical_tensors():
    model = FusedAttention()
    weight = model.attention.qk_proj.weight

    state = model_state(model)

    query, key = state["attention.q_proj.weight"], state["attention.k_proj.weight"]
    assert isinstance(query, ShardedTensor)
    assert (query.global_shape, key.global_shape) == ((8, 3), (2, 3))
    assert query.shards[0].offsets == (4, 0)
    assert torch.equal(query.shards[0].tensor, weight[:4])
    assert torch.equal(key.shards[0].tensor, weight[4:])


def test_model_state_shares_memory_with_the_parameters():
    model = FusedAttention()

    model_state(model)["attention.k_proj.weight"].shards[0].tensor.zero_()

    assert not model.attention.qk_proj.weight[4:].any()


def test_model_state_of_a_layer_that_lost_its_metadata_is_refused(run_ranks):
    def copy_and_ask() -> str:
        from nxd_layers import ColumnParallelLinear
        from nxd_state import initialize_model_parallel

        initialize_model_parallel(tensor_model_parallel_size=2)
        model = nn.Sequential(ColumnParallelLinear(4, 4))
        assert set(model_state(model)) == {"0.weight", "0.bias"}
        with pytest.raises(ValueError, match="lost its shard metadata") as raised:
            model_state(copy.deepcopy(model))
        return str(raised.value)

    for message in run_ranks(copy_and_ask, 2):
        assert message.startswith("0.weight is split over 2 ranks")


@pytest.mark.parametrize(
    ("parameter", "relative", "expected"),
    [
        ("layers.0.attention.qkv.weight", "q_proj.weight", "layers.0.attention.q_proj.weight"),
        ("layers.0.attention.qkv.weight", "", "layers.0.attention.qkv.weight"),
        ("qkv.weight", "q_proj.weight", "q_proj.weight"),
    ],
)
def test_logical_name_is_relative_to_the_parent_of_the_owning_module(parameter, relative, expected):
    assert logical_name(parameter, relative) == expected


def test_optimizer_state_is_sharded_as_the_parameters_are():
    model = FusedAttention()
    optimizer = torch.optim.AdamW(model.parameters())
    model.attention.qk_proj(torch.ones(3)).sum().backward()
    optimizer.step()

    state = optimizer_state(model, optimizer)

    assert set(state) == {
        "optimizer/attention.q_proj.weight/exp_avg",
        "optimizer/attention.q_proj.weight/exp_avg_sq",
        "optimizer/attention.k_proj.weight/exp_avg",
        "optimizer/attention.k_proj.weight/exp_avg_sq",
        "optimizer/attention.q_proj.weight/step",
        "optimizer/attention.k_proj.weight/step",
    }


@pytest.mark.parametrize("model_type", [TiedModel, FusedAttention])
def test_allocated_optimizer_state_takes_what_another_optimizer_holds(model_type):
    model = model_type()
    trained, fresh = (torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2))
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    trained.step()
    stored = optimizer_state(model, trained)

    allocate_optimizer_state(model, fresh, {name: (t.dtype, shape(t)) for name, t in stored.items()})

    for name, destination in optimizer_state(model, fresh).items():
        copy_into(destination, stored[name])
    for parameter in model.parameters():
        for key, value in trained.state[parameter].items():
            assert torch.equal(fresh.state[parameter][key], value)


def test_optimizer_state_of_another_models_parameter_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(2, 3).parameters())

    with pytest.raises(ValueError, match=r"a \(3, 2\) parameter that the model does not have"):
        optimizer_state(TiedModel(), optimizer)


def test_optimizer_state_that_is_neither_tensor_nor_number_is_named():
    model = TiedModel()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.head.weight]["momentum"] = "0.5"

    with pytest.raises(ValueError, match=r"optimizer state 'momentum' of embedding.weight is a str"):
        optimizer_state(model, optimizer)


def shape(tensor) -> tuple[int, ...]:
    return tensor.global_shape if isinstance(tensor, ShardedTensor) else tuple(tensor.shape)


def copy_into(destination, source) -> None:
    if isinstance(destination, ShardedTensor):
        for mine, theirs in zip(destination.shards, source.shards, strict=True):
            mine.tensor.copy_(theirs.tensor)
    else:
        destination.copy_(source)
