"""What modules, optimizers and others give and take only by their own methods; and what replicas have differently."""

import numpy as np
import nxd_ckpt
import pytest
import torch
from nxd_ckpt import CheckpointError, PerRank, async_save, end_async_saves, load, open_checkpoint, save
from nxd_ckpt.testing import run_on_threads
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR


@pytest.mark.parametrize("form", ["module", "check_replicas", "in background", "state_dict", "other object"])
def test_buffers_that_replicas_have_differently_come_from_the_first_one_together(tmp_path, form):
    def write(ranks):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), *(nn.BatchNorm1d(size) for size in (3, 5, 7)))
        nn.init.ones_(model[0].weight)
        for module in model[1:]:
            module.running_mean.fill_(ranks.rank)
            module.running_var.fill_(ranks.rank)
            module.num_batches_tracked.fill_(ranks.rank)
        state = {"state_dict": model.state_dict(), "other object": [dict(model.named_buffers()), model[0].weight]}
        if form == "in background":
            async_save(tmp_path, "a", {"model": model}, process_group=ranks).wait()
        else:
            checked = form == "check_replicas"
            save(tmp_path, "a", {"model": state.get(form, model)}, process_group=ranks, check_replicas=checked)

    run_on_threads(write, world_size=3)
    end_async_saves()

    checkpoint = open_checkpoint(tmp_path)
    buffers = [name for name in checkpoint.tensors if "running" in name or "tracked" in name]
    assert len(buffers) == 9
    assert all(not checkpoint.read(name).any() for name in buffers)


def test_large_bare_tensors_are_written_by_several_replicas(tmp_path):
    large = {f"weight{i}": torch.zeros(2**18 + 1) for i in range(3)}
    run_on_threads(lambda ranks: save(tmp_path, "a", large, process_group=ranks), world_size=3)

    written = {chunk.file for it in open_checkpoint(tmp_path).manifest.tensors.values() for chunk in it.chunks}
    assert len(written) == 3


def test_number_of_numpy_is_saved_as_a_number(tmp_path):
    save(tmp_path, "a", {"w": torch.ones(1), "loss": np.float64(0.5)})
    into = {"w": torch.zeros(1), "loss": 0.0}
    load(tmp_path, into=into)

    assert into["loss"] == 0.5


def test_sparse_tensor_is_refused_by_path(tmp_path):
    with pytest.raises(ValueError, match=r"'table': .*must be a dense tensor"):
        save(tmp_path, "a", {"table": torch.eye(2).to_sparse()})


class Fused(nn.Module):
    """Has two parameters, of which its state dict has the sum alone, as hooks do that fuse or cast."""

    def __init__(self, takes=True):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_state_dict_post_hook(self._fuse)
        if takes:
            self.register_load_state_dict_pre_hook(self._split)

    @staticmethod
    def _fuse(module, content, prefix, local_metadata):
        content[prefix + "ab"] = torch.cat([content.pop(prefix + name).half() for name in "ab"])

    @staticmethod
    def _split(module, content, prefix, *args):
        content[prefix + "a"], content[prefix + "b"] = content.pop(prefix + "ab").chunk(2)


class Writes(nn.Module):
    """Has a list of tensors, which it saves and loads by methods of its own."""

    def __init__(self):
        super().__init__()
        self.rows, self.sum = [torch.zeros(2), torch.zeros(2)], 0.0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "rows"] = torch.stack(self.rows)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.rows = list(state_dict[prefix + "rows"])


class Derives(nn.Module):
    """Keeps what it derives of its weight when it is loaded."""

    def __init__(self):
        super().__init__()
        self.weight, self.total = nn.Parameter(torch.zeros(3)), None
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "total", float(module.weight.sum())))


def test_what_a_state_dict_makes_goes_back_through_load_state_dict(tmp_path):
    def made(value):
        model = nn.Sequential(Fused(), Writes(), Derives())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
            model[1].rows = [row + value for row in model[1].rows]
        return model

    save(tmp_path, "a", {"model": made(2.0)})
    model = made(0.0)
    load(tmp_path, into={"model": model})

    assert [parameter.tolist() for parameter in model.parameters()] == [[2.0] * 3] * 3
    assert model[0].b.dtype == torch.float64
    assert torch.equal(torch.stack(model[1].rows), torch.full((2, 2), 2.0))
    assert model[2].total == 6.0


def test_state_dict_that_its_module_does_not_load_is_refused_by_path(tmp_path):
    save(tmp_path, "a", {"model": nn.Sequential(Fused(takes=False))})

    with pytest.raises(CheckpointError, match=r"model.0.ab is in the state_dict of a Sequential, but its load_state"):
        load(tmp_path, into={"model": nn.Sequential(Fused(takes=False))})


class HasExtra(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        (torch.arange(5), torch.zeros(0)),
        ({"scale": torch.ones(3), "steps": 2, "by": {7: (1, 2)}}, None),
        (None, {"scale": torch.ones(3)}),
        ([torch.ones(1), 2.5], []),
        ({"steps": 2}, {"steps": 0}),
    ],
)
def test_extra_state_of_any_kind_reaches_set_extra_state(tmp_path, saved, fresh):
    save(tmp_path, "a", {"model": nn.Sequential(HasExtra(saved))})
    model = nn.Sequential(HasExtra(fresh))

    load(tmp_path, into={"model": model})

    torch.testing.assert_close(model[0].extra, saved, rtol=0, atol=0)
    assert repr(model[0].extra) == repr(saved)


class Global(torch.optim.SGD):
    """Has entries of its state that belong to no parameter."""

    def step(self):
        super().step()
        mine = self.state.setdefault("mine", {"steps": 0, "sum": torch.zeros(2)})
        mine["steps"] += 1
        mine["sum"] += 1


class OwnAttributes(torch.optim.Adam):
    """Saves and loads attributes of its own, as wrappers of optimizers do."""

    average = 0.0

    def step(self):
        super().step()
        self.average = self.average / 2 + 1

    def state_dict(self):
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Hooked(torch.optim.Adam):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.count = 0
        self.register_state_dict_post_hook(lambda it, state: {**state, "count": it.count})
        self.register_load_state_dict_pre_hook(lambda it, state: setattr(it, "count", state["count"]))

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


def trained(optimizer_class, steps, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model, optimizer, steps):
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = (model(torch.eye(3, dtype=torch.float64)) - 2).square().sum()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()


@pytest.mark.parametrize("optimizer_class", [Global, OwnAttributes, Hooked, torch.optim.LBFGS])
@pytest.mark.parametrize("steps_before_load", [0, 1])
def test_state_outside_of_parameters_is_there_after_a_load(tmp_path, optimizer_class, steps_before_load):
    options = {"max_iter": 2} if optimizer_class is torch.optim.LBFGS else {}
    model, optimizer = trained(optimizer_class, 3, **options)
    save(tmp_path, "a", {"model": model, "optimizer": optimizer})
    other, other_optimizer = trained(optimizer_class, steps_before_load, **options)

    load(tmp_path, into={"model": other, "optimizer": other_optimizer})

    torch.testing.assert_close(other_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    go_on(model, optimizer, 2)
    go_on(other, other_optimizer, 2)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, OwnAttributes])
def test_state_of_a_parameter_that_had_no_gradient_when_saved_is_dropped_as_torch_does(tmp_path, optimizer_class):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
        return model, optimizer_class(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.eye(3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()

    model, optimizer = made()
    step(model[:1], optimizer)
    save(tmp_path, "a", {"model": model, "optimizer": optimizer})
    other, other_optimizer = made()
    for _ in range(3):  # as a run that goes back to an earlier checkpoint has
        step(other, other_optimizer)
    load(tmp_path, into={"model": other, "optimizer": other_optimizer})

    torch.testing.assert_close(other_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    for _ in range(2):
        step(model, optimizer)
        step(other, other_optimizer)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_states_that_the_checkpoint_has_otherwise_are_refused_by_path(tmp_path):
    model, optimizer = trained(torch.optim.AdamW, 1)
    save(tmp_path, "a", {"model": model, "optimizer": optimizer})
    other, other_optimizer = trained(torch.optim.SGD, 1, momentum=0.9)

    with pytest.raises(
        CheckpointError, match=r"'optimizer.state.model.weight.momentum_buffer' .* not in the checkpoint"
    ):
        load(tmp_path, into={"model": other, "optimizer": other_optimizer})


class Flat(torch.optim.SGD):
    def state_dict(self):
        return {"flat": torch.zeros(4)}


def test_state_dict_of_no_known_form_is_refused_by_path(tmp_path):
    model = nn.Linear(2, 2)

    with pytest.raises(ValueError, match="'optimizer' is a Flat, whose state_dict is not in torch's form"):
        save(tmp_path, "a", {"model": model, "optimizer": Flat(model.parameters())})


def test_groups_take_their_options_by_the_names_of_parameters_alone(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save(tmp_path, "a", {"model": model, "optimizer": torch.optim.SGD(model[0].parameters(), lr=1.0)})
    groups = [{"params": list(model[1].parameters()), "lr": 7.0}, {"params": list(model[0].parameters()), "lr": 3.0}]
    optimizer = torch.optim.SGD(groups)

    load(tmp_path, into={"model": model, "optimizer": optimizer})

    assert [group["lr"] for group in optimizer.param_groups] == [7.0, 1.0]


def test_groups_of_different_options_that_are_merged_are_refused_before_anything_changes(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(model, (1.0, 2.0), strict=True)]
    save(tmp_path, "a", {"model": model, "optimizer": torch.optim.SGD(groups)})
    before = torch.zeros_like(model[0].weight)
    with torch.no_grad():
        model[0].weight.zero_()

    with pytest.raises(CheckpointError, match=r"group 0 of 'optimizer' .* different options: lr was \[1.0, 2.0\]"):
        load(tmp_path, into={"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=5.0)})

    assert torch.equal(model[0].weight, before)


def test_groups_and_numbers_of_ranks_with_other_parameters_are_saved_of_all(tmp_path):
    class Counts(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1

    def stage_of(rank):
        model = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2)})
        return {"model": model, "optimizer": Counts(model.parameters(), lr=float(rank))}

    def write(ranks):
        state = stage_of(ranks.rank)
        state["optimizer"].step()
        save(tmp_path, "a", state, process_group=ranks)

    run_on_threads(write, world_size=2)
    into = stage_of(1)
    into["optimizer"].param_groups[0]["lr"] = 9.0
    load(tmp_path, into=into, strict=False)

    assert into["optimizer"].param_groups[0]["lr"] == 1.0
    assert [state["steps"] for state in into["optimizer"].state.values()] == [1, 1]


@pytest.mark.parametrize(
    "state",
    [
        {"run.epoch": 1, "run": {"epoch": 2, "w": torch.ones(1)}},
        {"a": [torch.ones(1), 5], "a.1": 6},
        {"a": {1: 5, "1": 6, "w": torch.ones(1)}},
        {"a": PerRank(1), "b": torch.ones(1), "": {"a": 3, "w": torch.ones(1)}},
    ],
)
def test_two_values_of_one_path_are_refused(tmp_path, state):
    with pytest.raises(ValueError, match=r"two values of the state are named '[a-z.0-9]+'; rename a key"):
        save(tmp_path, "a", state)


def test_keys_of_any_kind_come_back_as_they_were(tmp_path):
    content = {1: "one", "1": "text", "deep": {"$tensor": "x", 2: (1, [2.0])}, "empty": {}, "$dict": []}
    save(tmp_path, "a", {"w": torch.ones(1), "content": content})
    into = {"w": torch.ones(1), "content": {3: 4}}

    load(tmp_path, into=into)

    assert into["content"] == content


@pytest.mark.parametrize(("saved", "fresh"), [([2, 4], [2]), ([2], [2, 4])])
def test_schedulers_of_other_milestones_take_over_all_keys(tmp_path, saved, fresh):
    def scheduler_of(milestones):
        return MultiStepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), milestones)

    scheduler = scheduler_of(saved)
    save(tmp_path, "a", {"scheduler": scheduler})
    other = scheduler_of(fresh)
    load(tmp_path, into={"scheduler": other})

    assert other.state_dict() == scheduler.state_dict()
    assert type(other.milestones) is type(scheduler.milestones)


def test_value_that_is_left_out_below_what_is_asked_for_is_an_error_if_strict(tmp_path):
    save(tmp_path, "a", {"run": {"w": torch.ones(1), "epoch": 3}, "other": 1})
    into = {"run": {"w": torch.zeros(1)}}

    with pytest.raises(CheckpointError, match=r"the value 'run\.epoch' is in the checkpoint but was not requested"):
        load(tmp_path, into=into)
    load(tmp_path, into=into, strict=False)

    assert into["run"]["w"] == 1
    assert nxd_ckpt.latest(tmp_path).tag == "a"
