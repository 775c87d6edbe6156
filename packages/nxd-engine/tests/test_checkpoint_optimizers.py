"""Optimizer states of every class and dtype, with ZeRO-1 and without: what was loaded goes on as what was saved."""

import nxd_ckpt
import pytest
import torch
from nxd_ckpt import CheckpointError, open_checkpoint
from nxd_ckpt.interop import from_checkpoint, read_whole
from nxd_engine import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    load_checkpoint,
    neuronx_distributed_config,
    save_checkpoint,
)
from nxd_engine.checkpoints.merged_weights import ModelTensors
from nxd_engine.checkpoints.optimizer_state import optimizer_state
from nxd_engine.checkpoints.state import model_state
from nxd_engine.unwrap import plain_model, plain_optimizer
from nxd_optim import Adafactor
from torch import nn

pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.sample(8)]  # each takes its time


class Scaled(nn.Linear):
    """With a parameter that is a scalar."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (super().forward(x) * self.scale).square().sum()


def build(optimizer_class, *, zero1=False, dtype=torch.float32, masters=True, **defaults):
    config = neuronx_distributed_config(
        optimizer_config={"zero_one_enabled": zero1},
        mixed_precision_config={"use_master_weights": masters and zero1},
    )
    model = initialize_parallel_model(config, lambda: Scaled().to(dtype))
    return model, initialize_parallel_optimizer(config, optimizer_class, model.parameters(), **defaults)


def step(model, optimizer):
    model(torch.ones(1, 3, dtype=model.dtype)).backward()
    optimizer.step()
    optimizer.zero_grad()


CLASSES = ["SGD", "Adam", "AdamW", "RAdam", "NAdam", "Adamax", "Adagrad", "Adadelta", "Rprop", "ASGD", "RMSprop"]


def next_weights(folder, saved, loaded, **defaults):
    """Save after a step; the weights after the next step, of the run itself and of another that has loaded it."""
    (optimizer_class, zero1), (its_class, its_zero1) = saved, loaded
    model, optimizer = build(optimizer_class, zero1=zero1, **defaults)
    step(model, optimizer)
    save_checkpoint(folder, "a", model, optimizer)
    other, its_optimizer = build(its_class, zero1=its_zero1, **defaults)

    load_checkpoint(folder, model=other, optimizer=its_optimizer)

    step(model, optimizer)
    step(other, its_optimizer)
    return list(zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "zero1"), [(name, zero1) for name in CLASSES for zero1 in (False, True)] + [("Adafactor", False)]
)
def test_next_step_after_loading_is_that_of_the_run_itself(tmp_path, name, zero1):
    kind = (getattr(torch.optim, name), zero1)
    defaults = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}

    assert all(torch.equal(a, b) for a, b in next_weights(tmp_path, kind, kind, **defaults))


@pytest.mark.parametrize("loaded", [(Adafactor, False), (Adafactor, True)])
@pytest.mark.parametrize("saved", [(torch.optim.Adafactor, False), (Adafactor, False), (Adafactor, True)])
def test_next_step_of_adafactor_is_that_of_the_run_whoever_saved(tmp_path, saved, loaded):
    weights = next_weights(tmp_path, saved, loaded)

    is_zero1, its_zero1 = saved[1], loaded[1]
    assert all(torch.equal(a, b) if is_zero1 == its_zero1 else torch.allclose(a, b) for a, b in weights)


KINDS = {
    "plain float32": {},
    "plain bfloat16": {"dtype": torch.bfloat16},
    "ZeRO-1 bfloat16": {"dtype": torch.bfloat16, "zero1": True},
    "ZeRO-1 bfloat16 without masters": {"dtype": torch.bfloat16, "zero1": True, "masters": False},
    "ZeRO-1 float64": {"dtype": torch.float64, "zero1": True},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("loaded", KINDS)
def test_states_of_another_dtype_are_converted_to_what_the_optimizer_keeps(tmp_path, saved, loaded):
    model, optimizer = build(torch.optim.AdamW, lr=0.01, **KINDS[saved])
    step(model, optimizer)
    save_checkpoint(tmp_path, "a", model, optimizer)
    other, its_optimizer = build(torch.optim.AdamW, lr=0.5, **KINDS[loaded])

    load_checkpoint(tmp_path, model=other, optimizer=its_optimizer)

    step(model, optimizer)
    step(other, its_optimizer)
    for expected, found in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(found.double(), expected.double(), rtol=0.02, atol=0.005)


@pytest.mark.parametrize("zero1", [False, True])
def test_states_of_another_class_are_refused_at_once(tmp_path, zero1):
    model, optimizer = build(torch.optim.SGD, lr=0.1, momentum=0.9)
    step(model, optimizer)
    save_checkpoint(tmp_path, "a", model, optimizer)
    other, its_optimizer = build(torch.optim.AdamW, zero1=zero1)

    with pytest.raises(CheckpointError, match=r"has a state 'step', but the given states are \['momentum_buffer'\]"):
        load_checkpoint(tmp_path, model=other, optimizer=its_optimizer)


def bfloat16_with_masters(*, saved=True, dtype=torch.bfloat16, zero1=True):
    config = neuronx_distributed_config(
        optimizer_config={"zero_one_enabled": zero1},
        mixed_precision_config={"use_master_weights_in_ckpt": saved and zero1},
    )
    model = initialize_parallel_model(config, lambda: Scaled().to(dtype))
    return model, initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.01)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_weights_left_out_of_a_checkpoint_come_back_from_their_masters(tmp_path, with_optimizer):
    model, optimizer = bfloat16_with_masters()
    step(model, optimizer)
    save_checkpoint(tmp_path, "a", model, optimizer, avoid_saving_lower_precision_weights=True)
    other, its_optimizer = bfloat16_with_masters()

    load_checkpoint(tmp_path, model=other, optimizer=its_optimizer if with_optimizer else None)

    assert not {"weight", "bias", "scale"} & open_checkpoint(tmp_path, "a").tensors.keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    if with_optimizer:
        step(model, optimizer)
        step(other, its_optimizer)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_left_out_of_a_checkpoint_are_read_as_their_masters(tmp_path):
    model, optimizer = bfloat16_with_masters()
    step(model, optimizer)
    save_checkpoint(tmp_path, "a", model, optimizer, avoid_saving_lower_precision_weights=True)

    weights = ModelTensors(from_checkpoint(open_checkpoint(tmp_path, "a")))

    assert weights.tensors.keys() == {"weight", "bias", "scale"}
    assert weights.tensors["weight"].dtype == torch.float32
    assert torch.equal(read_whole(weights, "weight").bfloat16(), dict(model.named_parameters())["weight"])


@pytest.mark.parametrize(
    "kind", [{"saved": False}, {"dtype": torch.float32}, {"zero1": False}], ids=["masters not saved", "wide", "plain"]
)
def test_weights_without_wider_masters_are_saved_whoever_wants_to_avoid_it(tmp_path, caplog, kind):
    model, optimizer = bfloat16_with_masters(**kind)
    step(model, optimizer)

    with caplog.at_level("INFO", logger="nxd_engine"):
        save_checkpoint(tmp_path, "a", model, optimizer, avoid_saving_lower_precision_weights=True)

    assert {"weight", "bias", "scale"} <= open_checkpoint(tmp_path, "a").tensors.keys()
    assert (
        caplog.messages.count("avoid_saving_lower_precision_weights has no effect: no wider master weights are saved")
        == 1
    )


def test_zero1_dcp_is_taken_and_said_to_change_nothing(tmp_path, caplog):
    model, optimizer = build(torch.optim.AdamW, zero1=True, lr=0.1)
    step(model, optimizer)

    with caplog.at_level("INFO", logger="nxd_engine"):
        save_checkpoint(tmp_path, "a", model, optimizer, None, None, 8, False, None, False, False, True)
        load_checkpoint(tmp_path, "a", model, optimizer, None, 8, True, True)

    assert [message.partition(":")[0] for message in caplog.messages if "dcp" in message] == [
        "use_zero1_dcp has no effect"
    ] * 2


class Global(torch.optim.SGD):
    """Has an entry of its state that belongs to no parameter."""

    def step(self, closure=None):
        super().step(closure)
        mine = self.state.setdefault("mine", {"steps": 0, "sum": torch.zeros(2)})
        mine["steps"] += 1
        mine["sum"] += 1


class OwnAttributes(torch.optim.Adam):
    """Saves and loads an attribute of its own, as wrappers of optimizers do."""

    average = 0.0

    def step(self, closure=None):
        self.average = self.average / 2 + 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


@pytest.mark.parametrize("optimizer_class", [Global, OwnAttributes])
def test_state_outside_of_parameters_is_there_after_a_load(tmp_path, optimizer_class):
    model, optimizer = build(optimizer_class, lr=0.1)
    step(model, optimizer)
    step(model, optimizer)
    save_checkpoint(tmp_path, "a", model, optimizer)
    other, its_optimizer = build(optimizer_class, lr=0.2)

    load_checkpoint(tmp_path, model=other, optimizer=its_optimizer)

    torch.testing.assert_close(its_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    plain, its_optimizer = build(torch.optim.SGD, lr=0.2)
    if optimizer_class is OwnAttributes:
        with pytest.raises(CheckpointError, match=r"was saved with \['average'\] by its own state_dict, which SGD"):
            load_checkpoint(tmp_path, model=plain, optimizer=its_optimizer)


def test_skipped_steps_of_zero1_are_counted_on(tmp_path):
    model, optimizer = build(torch.optim.AdamW, zero1=True)
    step(model, optimizer)
    optimizer.optimizer.skipped_steps = 3
    save_checkpoint(tmp_path, "a", model, optimizer)
    for zero1, expected in ((True, 3), (False, None)):
        other, its_optimizer = build(torch.optim.AdamW, zero1=zero1)
        load_checkpoint(tmp_path, model=other, optimizer=its_optimizer)
        assert getattr(its_optimizer, "skipped_steps", None) == expected


class HasExtra(Scaled):
    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("extra", [{"steps": 2, "by": {7: (1, 2)}}, torch.arange(5), [torch.ones(2), "text"]])
def test_extra_state_of_modules_reaches_set_extra_state(tmp_path, extra):
    def made(value):
        model = initialize_parallel_model(neuronx_distributed_config(), HasExtra)
        next(it for it in model.modules() if isinstance(it, HasExtra)).extra = value
        return model

    save_checkpoint(tmp_path, "a", made(extra))
    model = made(None)
    load_checkpoint(tmp_path, model=model)

    found = next(it for it in model.modules() if isinstance(it, HasExtra)).extra
    assert repr(found) == repr(extra)


@pytest.mark.parametrize("has_settings", [True, False])
def test_states_without_settings_load_with_a_warning(tmp_path, caplog, has_settings):
    model, optimizer = build(torch.optim.AdamW, lr=0.1)
    step(model, optimizer)
    if has_settings:
        save_checkpoint(tmp_path, "a", model, optimizer)
    else:  # as `nxd-ckpt convert` writes states of other libraries
        states = model_state(model) | optimizer_state(plain_model(model), plain_optimizer(optimizer))
        nxd_ckpt.save(tmp_path, "a", states)

    load_checkpoint(tmp_path, "a", model=model, optimizer=optimizer)

    assert ("the checkpoint holds no learning rate" in caplog.text) is not has_settings


@pytest.mark.parametrize("has_settings", [True, False])
@pytest.mark.parametrize("restored", [True, False])
def test_settings_of_the_optimizer_are_restored_unless_they_are_to_stay(tmp_path, caplog, has_settings, restored):
    model, optimizer = build(torch.optim.AdamW, lr=0.1)
    step(model, optimizer)
    if has_settings:
        save_checkpoint(tmp_path, "a", model, optimizer)
    else:  # as `nxd train` writes states, since its recipe has the settings
        states = model_state(model) | optimizer_state(plain_model(model), plain_optimizer(optimizer))
        nxd_ckpt.save(tmp_path, "a", states)
    model, optimizer = build(torch.optim.AdamW, lr=0.2)

    load_checkpoint(tmp_path, "a", model=model, optimizer=optimizer, optimizer_settings=restored)

    assert optimizer.param_groups[0]["lr"] == (0.1 if restored and has_settings else 0.2)
    assert ("holds no learning rate" in caplog.text) is (restored and not has_settings)
