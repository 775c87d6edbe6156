"""Tensors that say which part of a whole they are, and tensors that are marked as parts and do not say which."""

import copy
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import nxd_ckpt
import pytest
import torch
from nxd_ckpt import load, open_checkpoint, save
from nxd_ckpt.testing import run_on_threads
from torch import nn
from torch.nn.utils import parametrizations, prune


def box(offset, shape):
    return SimpleNamespace(offset=offset, shape=shape)


def rows_of(shape, rank, size, *, name="", padding=0):
    """A spec by the protocol alone: rows of a whole, and padding rows behind them."""
    count = shape[0] // size
    piece = SimpleNamespace(
        local=box((0, 0), (count, shape[1])),
        logical=box((rank * count, 0), (count, shape[1])),
        logical_shape=shape,
        name=name,
    )
    return SimpleNamespace(local_shape=(count + padding, shape[1]), pieces=(piece,))


class Rows(nn.Module):
    """Rows of a weight [4, 3], under a name of its own in the whole model, and a bias that all ranks have."""

    def __init__(self, rank, size):
        super().__init__()
        spec = rows_of((4, 3), rank, size, name="q.weight", padding=1)
        weight = torch.full(spec.local_shape, -1.0)
        weight[:-1] = torch.arange(12.0).reshape(4, 3)[rank * 4 // size : (rank + 1) * 4 // size]
        self.fused = nn.Module()
        self.fused.weight = nn.Parameter(weight)
        self.fused.weight.shard_spec = spec
        self.bias = nn.Parameter(torch.ones(2))

    def step(self, optimizer):
        (self.fused.weight[:-1].square().sum() + self.bias.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(rank, size, **options):
    model = Rows(rank, size)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1, **options)}


def test_parameters_that_say_their_boxes_and_their_states_load_at_another_layout(tmp_path):
    def write(ranks):
        state = state_of(ranks.rank, 2)
        state["model"].step(state["optimizer"])
        save(tmp_path, "a", state, process_group=ranks)

    run_on_threads(write, world_size=2)
    expected = state_of(0, 1)
    expected["model"].step(expected["optimizer"])
    into = state_of(0, 1)
    load(tmp_path, into=into)

    assert open_checkpoint(tmp_path).tensors["model.q.weight"].global_shape == (4, 3)
    assert "optimizer.state.model.q.weight.exp_avg" in open_checkpoint(tmp_path).tensors
    for state in (expected, into):
        state["model"].step(state["optimizer"])
    assert torch.equal(into["model"].fused.weight[:-1], expected["model"].fused.weight[:-1])


def test_state_dict_of_a_module_with_parts_is_saved_and_loaded_as_parts(tmp_path):
    def write(ranks):
        model = Rows(ranks.rank, 2)
        save(tmp_path, "a", {"model": model.state_dict()}, process_group=ranks)
        with torch.no_grad():
            model.fused.weight.zero_()
        load(tmp_path, into={"model": model.state_dict()}, process_group=ranks)
        assert torch.equal(model.fused.weight[:-1], Rows(ranks.rank, 2).fused.weight[:-1])

    run_on_threads(write, world_size=2)

    assert torch.equal(open_checkpoint(tmp_path).read("model.q.weight"), torch.arange(12.0).reshape(4, 3))


def test_parts_are_looked_for_once_in_a_save_and_only_for_state_dicts(tmp_path, monkeypatch):
    walks, get_objects = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: walks.append(1) or get_objects())

    save(tmp_path, "modules", {"a": nn.Linear(2, 2), "b": {"c": torch.ones(2)}})
    assert walks == []
    save(tmp_path, "state_dicts", {name: nn.Linear(2, 2).state_dict() for name in "abc"})
    assert len(walks) == 1


class OfTheirOwn(torch.Tensor):
    """A subclass that may mean anything."""


def marked(**attributes):
    tensor = nn.Parameter(torch.ones(2, 2))
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


class LostItsSpec(nn.Module):
    tensor_parallel_size = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))


def holding(tensor):
    module = nn.Module()
    module.weight = tensor
    return module


UNKNOWN = [
    ({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}, "tensor_model_parallel=True, part"),
    ({"partition_dim": 1}, "partition_dim=1"),
    ({"expert_model_parallel": True}, "expert_model_parallel=True"),
    ({"allreduce": False}, "allreduce=False"),
    ({"_is_sharded": True}, "_is_sharded=True"),
    ({"ds_tensor": torch.ones(1)}, "ds_tensor=Tensor"),
]
WHOLE = [
    {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1},
    {"tensor_model_parallel": True, "partition_dim": 0, "num_partitions": 1},
    {"allreduce": True},
    {"shard_spec": None, "sequence_parallel_enabled": True},
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("attributes", "message"), UNKNOWN)
@pytest.mark.parametrize("where", ["module", "tensor", "state_dict"])
def test_tensor_marked_as_a_part_is_refused_by_path_on_several_ranks(tmp_path, attributes, message, where):
    module = holding(marked(**attributes))
    state = {
        "x": {"module": module, "tensor": dict(module.named_parameters()), "state_dict": module.state_dict()}[where]
    }

    def write(ranks):
        with pytest.raises(ValueError, match=f"'x.weight': .*{message}.*nothing says which part"):
            save(tmp_path, "a", state, process_group=ranks)

    run_on_threads(write, world_size=2)
    save(tmp_path, "a", state)  # one process has all of everything
    assert open_checkpoint(tmp_path).tensors["x.weight"].global_shape == (2, 2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": torch.ones(2).as_subclass(OfTheirOwn)}, "'w': a OfTheirOwn .* may be a part"),
        ({"m": holding(nn.Parameter(torch.ones(2).as_subclass(OfTheirOwn)))}, "'m.weight': a OfTheirOwn"),
        ({"m": LostItsSpec()}, "'m': .*weight is split over 2 ranks but has lost its shard_spec"),
    ],
)
def test_subclass_nobody_knows_and_layer_without_its_spec_are_refused_by_path(tmp_path, state, message):
    def write(ranks):
        with pytest.raises(ValueError, match=message):
            save(tmp_path, "a", state, process_group=ranks)

    run_on_threads(write, world_size=2)
    assert nxd_ckpt.list_checkpoints(tmp_path) == []


class Split(nn.Linear):
    """A layer of which two ranks have four rows each."""

    tensor_parallel_size = 2

    def __init__(self, rank):
        super().__init__(3, 4, bias=False)
        self.weight.shard_spec = rows_of((8, 3), rank, 2)


def with_buffer(layer, **attributes):
    layer.register_buffer("usage", torch.ones(4))
    for name, value in attributes.items():
        setattr(layer.usage, name, value)
    return layer


def pruned(layer):
    return prune.random_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (parametrizations.weight_norm, "parametrizations.weight.original0"),
        (parametrizations.spectral_norm, "parametrizations.weight.0._u"),
        (pruned, "weight_mask"),
        (with_buffer, "usage"),
        (lambda layer: with_buffer(layer, num_partitions=1), None),
        (lambda layer: layer, None),
    ],
)
def test_what_belongs_to_a_split_weight_and_does_not_say_its_part_is_refused_by_path(tmp_path, change, refused):
    def write(ranks):
        state = {"m": nn.Sequential(change(Split(ranks.rank)))}
        message = f"'m': 0.{refused} .*belongs to a weight split over 2 ranks"
        with pytest.raises(ValueError, match=message) if refused else nullcontext():
            save(tmp_path, "a", state, process_group=ranks)

    run_on_threads(write, world_size=2)


@pytest.mark.parametrize("copies", ["averages", "a copy's state_dict", "the optimizer's state_dict"])
def test_bare_copies_of_parts_are_refused_by_path(tmp_path, copies):
    def write(ranks):
        model = nn.Sequential(Split(ranks.rank))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        states = {
            "averages": ({name: it.detach().clone() for name, it in model.named_parameters()}, "c.0.weight"),
            "a copy's state_dict": (copy.deepcopy(model).state_dict(), "c.0.weight"),
            "the optimizer's state_dict": (optimizer.state_dict(), "c.state.0.exp_avg"),
        }
        state, path = states[copies]
        with pytest.raises(ValueError, match=f"'{path}'.* (pass the optimizer itself|set its shard_spec)"):
            save(tmp_path, "a", {"m": model, "c": state}, process_group=ranks)

    run_on_threads(write, world_size=2)


def test_state_dict_of_an_optimizer_of_whole_parameters_is_saved(tmp_path):
    def write(ranks):
        model = nn.Linear(2, 5)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        save(tmp_path, "a", {"m": model, "o": optimizer.state_dict()}, process_group=ranks)

    run_on_threads(write, world_size=2)
    assert open_checkpoint(tmp_path).tensors["o.state.0.exp_avg"].global_shape == (5, 2)


@pytest.mark.parametrize("attributes", WHOLE)
def test_tensor_marked_as_whole_is_saved_by_several_ranks(tmp_path, attributes):
    run_on_threads(
        lambda ranks: save(tmp_path, "a", {"m": holding(marked(**attributes))}, process_group=ranks), world_size=2
    )
    assert open_checkpoint(tmp_path).tensors["m.weight"].global_shape == (2, 2)


def test_state_of_another_shape_of_a_part_is_refused_by_path(tmp_path):
    def write(ranks):
        state = state_of(ranks.rank, 2)
        state["optimizer"] = torch.optim.Adafactor(state["model"].parameters())
        state["model"].step(state["optimizer"])
        with pytest.raises(ValueError, match=r"'optimizer.state.model.fused.weight.row_var' is a plain Tensor"):
            save(tmp_path, "a", state, process_group=ranks)

    run_on_threads(write, world_size=2)
