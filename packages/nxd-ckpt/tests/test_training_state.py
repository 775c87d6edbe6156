"""States as trainers have them: nested, with modules, optimizers, schedulers and torch's sharded tensors."""

import random

import nxd_ckpt
import pytest
import torch
from nxd_ckpt import PerRank, load, open_checkpoint, save
from nxd_ckpt.testing import run_on_threads
from torch import nn


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def trained(seed: int, steps: int = 3, optimizer_class=torch.optim.AdamW, **options):
    model = model_of(seed)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        train_step(model, optimizer)
    return model, optimizer


def train_step(model, optimizer):
    torch.manual_seed(9)
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_alike(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adam, {"fused": True}),
    ],
)
@pytest.mark.parametrize("steps_before_load", [0, 1])
def test_training_goes_on_from_model_optimizer_and_scheduler(tmp_path, optimizer_class, options, steps_before_load):
    model, optimizer = trained(0, 3, optimizer_class, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scheduler.step()
    save(tmp_path, "a", {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3})

    other, other_optimizer = trained(1, steps_before_load, optimizer_class, **options)
    other_scheduler = torch.optim.lr_scheduler.ExponentialLR(other_optimizer, 0.5)
    state = {"model": other, "optimizer": other_optimizer, "scheduler": other_scheduler, "step": 0}
    load(tmp_path, into=state)

    assert state["step"] == 3
    assert_alike(model, other)
    for it, optimizer_of_it, scheduler_of_it in (
        (model, optimizer, scheduler),
        (other, other_optimizer, other_scheduler),
    ):
        train_step(it, optimizer_of_it)
        scheduler_of_it.step()
    assert_alike(model, other)
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]
    assert scheduler.state_dict() == other_scheduler.state_dict()


def test_saving_an_optimizer_that_has_not_stepped_leaves_it_as_it_is(tmp_path):
    model, optimizer = trained(0, steps=0)
    save(tmp_path, "a", {"model": model, "optimizer": optimizer})
    assert not optimizer.state

    other, other_optimizer = trained(1, steps=0)
    load(tmp_path, into={"model": other, "optimizer": other_optimizer})
    for it, optimizer_of_it in ((model, optimizer), (other, other_optimizer)):
        train_step(it, optimizer_of_it)
    assert_alike(model, other)


def test_names_are_paths_and_values_are_at_theirs(tmp_path):
    model, _ = trained(0, steps=1)
    state = {
        "model": model.state_dict(),
        "rows": [torch.zeros(2), {"deep": torch.ones(3)}],
        "history": {"losses": [1.0, 0.5], "name": "run"},
    }
    save(tmp_path, "a", state)

    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {*(f"model.{name}" for name in model.state_dict()), "rows.0", "rows.1.deep"}
    into = {"model": model_of(1), "history": {}, "rows": [torch.ones(2), {"deep": torch.zeros(3)}]}
    load(tmp_path, into=into)
    assert into["history"] == {"losses": [1.0, 0.5], "name": "run"}
    assert [into["rows"][0].sum(), into["rows"][1]["deep"].sum()] == [0, 3]
    assert_alike(into["model"], model)


def test_wrappers_of_torch_do_not_change_names(tmp_path):
    model, optimizer = trained(0, steps=1)
    save(tmp_path, "a", {"model": torch.compile(model), "optimizer": optimizer})

    other, other_optimizer = trained(1, steps=0)
    load(tmp_path, into={"model": other, "optimizer": other_optimizer})
    assert_alike(model, other)


class Counting(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(2)), count

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_extra_state_of_modules_is_saved(tmp_path):
    save(tmp_path, "a", {"model": nn.Sequential(Counting(5))})
    other = nn.Sequential(Counting(0))

    load(tmp_path, into={"model": other})

    assert other[0].count == 5


def test_each_rank_gets_back_what_it_saved_of_its_own(tmp_path):
    def draw(group, seed):
        generator = torch.Generator().manual_seed(seed + group.rank)
        state = {
            "weight": torch.ones(4),
            "random": PerRank({"torch": generator.get_state(), "python": random.Random(group.rank).random()}),
        }
        return state, generator

    def write(group):
        save(tmp_path, "a", draw(group, 0)[0], process_group=group)

    def read(group):
        state, _ = draw(group, 100)
        load(tmp_path, into=state, process_group=group)
        expected, _ = draw(group, 0 if group.rank < 2 else 100)
        assert torch.equal(state["random"].value["torch"], expected["random"].value["torch"])
        return state["random"].value["python"]

    run_on_threads(write, world_size=2)
    drawn = run_on_threads(read, world_size=3)
    assert drawn == [random.Random(rank).random() for rank in range(3)]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": object()}}, "a.b is a object, which JSON cannot hold"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors of the state are named 'a.b'"),
        (
            {"optimizer": torch.optim.AdamW(model_of(0).parameters())},
            "'optimizer' has a parameter .* does not belong to a module in the state",
        ),
        ({("a", 1): torch.ones(1)}, r"the state has the key \('a', 1\); use strings or integers as keys"),
        ({"a": PerRank(torch.zeros(2**19))}, "'a' is a tensor of 2097152 bytes; PerRank takes plain tensors"),
        ({"a": torch.ones(1), "b": PerRank({1, 2})}, "b is a set, which JSON cannot hold"),
        ([torch.ones(1)], "the state is a list; pass"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_with_its_path(tmp_path, state, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, "a", state)
    assert nxd_ckpt.list_checkpoints(tmp_path) == []


def test_number_in_a_tuple_cannot_be_loaded(tmp_path):
    save(tmp_path, "a", {"pair": (torch.ones(1), 2)})

    with pytest.raises(nxd_ckpt.CheckpointError, match=r"'pair.1' is 0 in a tuple, which cannot be replaced"):
        load(tmp_path, into={"pair": (torch.zeros(1), 0)})


def test_value_that_is_not_there_is_an_error_before_anything_changes(tmp_path):
    save(tmp_path, "a", {"weight": torch.ones(2), "step": 1})
    into = {"weight": torch.zeros(2), "steps": 0}

    missing = "the value 'steps' was requested but is not in the checkpoint, which has step; leave it out"
    with pytest.raises(nxd_ckpt.CheckpointError, match=missing):
        load(tmp_path, into=into)

    assert into["weight"].sum() == 0


def test_values_file_of_a_stranger_is_only_read_as_json(tmp_path):
    save(tmp_path, "a", {"weight": torch.ones(2)}, extra={"values.json": b"[1"})

    with pytest.raises(nxd_ckpt.CheckpointError, match=r"values\.json is not valid JSON"):
        load(tmp_path, into={"weight": torch.zeros(2), "step": 0})


class CountingSteps(torch.optim.SGD):
    """Has a count in its states that is no tensor."""

    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1


def test_numbers_in_states_are_there_again_in_an_optimizer_that_has_not_stepped(tmp_path):
    model, optimizer = trained(0, 3, CountingSteps)
    save(tmp_path, "a", {"model": model, "optimizer": optimizer})

    other, other_optimizer = trained(1, 0, CountingSteps)
    load(tmp_path, into={"model": other, "optimizer": other_optimizer})

    assert [state["steps"] for state in other_optimizer.state.values()] == [3] * 4


class InParts(torch.optim.SGD):
    """Has several tensors in one state."""

    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "factors" not in state:
                state["factors"] = [torch.zeros(2), torch.zeros(3)]
            state["factors"][1] += 1


def test_states_of_several_tensors_are_there_again_in_an_optimizer_that_has_not_stepped(tmp_path):
    model, optimizer = trained(0, 3, InParts)
    save(tmp_path, "a", {"model": model, "optimizer": optimizer})

    other, other_optimizer = trained(1, 0, InParts)
    load(tmp_path, into={"model": other, "optimizer": other_optimizer})

    assert_alike(model, other)
    for state in other_optimizer.state.values():
        assert [factor.tolist() for factor in state["factors"]] == [[0, 0], [3, 3, 3]]
