"""`move_model_to_device`: from CPU and from meta, with everything that parameters know and share."""

import pytest
import torch
from nxd_state import get_shard_spec, move_model_to_device, set_partition_attributes, set_shard_spec, shard_along
from torch import nn


class Tied(nn.Module):
    """An embedding and a head that share a weight; buffers, one of them shared and one not saved."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.embedding = nn.Embedding(4, 3, device=device)
        self.norm = nn.LayerNorm(3, device=device)
        self.head = nn.Linear(3, 4, bias=False, device=device)
        self.head.weight = self.embedding.weight
        self.norm.bias.requires_grad = False
        self.register_buffer("positions", torch.arange(4, device=device))
        self.register_buffer("scratch", torch.zeros(2, device=device), persistent=False)
        self.norm.register_buffer("positions", self.positions)
        self.register_parameter("absent", None)
        self.register_buffer("absent_too", None)
        set_shard_spec(self.embedding.weight, shard_along((8, 3), 0, rank=1, size=2))
        set_partition_attributes(self.embedding.weight, partition_dim=0, num_partitions=2)
        self.norm.weight.sequence_parallel_enabled = True
        self.norm.weight.note = "anything else that was put there"


def assert_kept(model):
    weight = model.embedding.weight
    assert isinstance(weight, nn.Parameter)
    assert model.head.weight is weight
    assert get_shard_spec(weight) == shard_along((8, 3), 0, rank=1, size=2)
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.num_partitions) == (True, 0, 2)
    assert model.norm.weight.sequence_parallel_enabled is True
    assert model.norm.weight.note == "anything else that was put there"
    assert (weight.requires_grad, model.norm.bias.requires_grad) == (True, False)
    assert model.norm.positions is model.positions
    assert (model.absent, model.absent_too) == (None, None)
    assert set(model.state_dict()) == {
        "embedding.weight",
        "norm.weight",
        "norm.bias",
        "norm.positions",
        "head.weight",
        "positions",
    }


def devices_of(model):
    return {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]}


@pytest.mark.parametrize(("source", "target"), [("cpu", "cpu"), ("meta", "cpu"), ("cpu", "meta"), ("meta", "meta")])
def test_move_keeps_attributes_ties_and_buffers(source, target):
    model = Tied(source)

    moved = move_model_to_device(model, target)

    assert moved is model
    assert devices_of(model) == {target}
    assert_kept(model)


def test_move_to_its_own_device_keeps_values_and_objects():
    model = Tied()
    parameters, values = list(model.parameters()), [parameter.clone() for parameter in model.parameters()]

    move_model_to_device(model, torch.device("cpu"))

    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(map(torch.equal, model.parameters(), values))
    assert model.positions.tolist() == [0, 1, 2, 3]


def test_move_from_meta_gives_tensors_that_can_be_filled_and_trained():
    model = move_model_to_device(Tied("meta"), "cpu")

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.head(model.norm(model.embedding(torch.tensor([1])))).sum().backward()

    assert model.embedding.weight.grad.shape == (4, 3)
    assert model.norm.bias.grad is None


@pytest.fixture
def uninitialized_memory_is_nan():
    """What torch does for those who ask for determinism."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_move_from_meta_with_padding_gives_zeros(uninitialized_memory_is_nan):
    model = nn.Linear(2, 4, bias=False, device="meta")
    set_shard_spec(model.weight, shard_along((5, 2), 0, rank=1, size=2, padded_length=8))

    move_model_to_device(model, "cpu")

    assert torch.equal(model.weight, torch.zeros(4, 2))


def test_move_takes_gradients_along():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad.clone()

    move_model_to_device(model, "cpu")
    kept = model.weight.grad
    move_model_to_device(model, "meta")

    assert torch.equal(kept, gradient)
    assert (model.weight.grad.device.type, model.weight.grad.shape) == ("meta", (2, 2))


def test_move_keeps_an_optimizer_made_before_working():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()

    move_model_to_device(model, "cpu")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    assert torch.equal(model.weight, before - model.weight.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_move_to_cuda_and_back_keeps_values_and_objects():
    model = Tied()
    parameters, values = list(model.parameters()), [parameter.clone() for parameter in model.parameters()]

    move_model_to_device(model, "cuda")

    assert devices_of(model) == {"cuda"}
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert_kept(model)
    assert all(map(torch.equal, move_model_to_device(model, "cpu").parameters(), values))
