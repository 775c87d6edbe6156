"""A save that copies its tensors while the program goes on holds what they were at the call, or fails."""

import threading

import pytest
import torch
from nxd_ckpt import CheckpointError, async_save, end_async_saves, list_checkpoints, open_checkpoint, save
from nxd_ckpt.asynchronous.staging import DeferredCopies
from torch.optim.optimizer import register_optimizer_step_pre_hook

LARGE = 2**19  # elements of more bytes than are copied in the call


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    end_async_saves()


@pytest.fixture
def copying(monkeypatch):
    """The copies in the background begin when this event is set."""
    may_begin = threading.Event()
    finish = DeferredCopies.finish

    def finish_late(copies):
        may_begin.wait()
        finish(copies)

    monkeypatch.setattr(DeferredCopies, "finish", finish_late)
    yield may_begin
    may_begin.set()


def saved(folder, name):
    return open_checkpoint(folder).read(name)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_step_of_an_optimizer_waits_until_its_parameters_are_copied(tmp_path, copying, optimizer_class):
    model = torch.nn.Linear(LARGE, 1)
    before = model.weight.detach().clone()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    step_has_begun = register_optimizer_step_pre_hook(lambda *_: copying.set())

    handle = async_save(tmp_path, "a", {"model": model, "optimizer": optimizer}, copy_in_background=True)
    assert not handle.staged
    model(torch.ones(LARGE)).backward()
    optimizer.step()
    step_has_begun.remove()
    handle.wait()

    assert not torch.equal(model.weight, before)
    assert torch.equal(saved(tmp_path, "model.weight"), before)


def test_tensor_that_changed_before_it_was_copied_fails_the_save_by_name(tmp_path, copying):
    state = {"model": {"weight": torch.zeros(LARGE)}}
    save(tmp_path, "old", state, step=1)

    handle = async_save(tmp_path, "new", state, step=2, copy_in_background=True)
    state["model"]["weight"][7] = 1
    copying.set()
    with pytest.raises(CheckpointError, match=r"'model\.weight' has changed before it was copied"):
        handle.wait()

    assert [info.tag for info in list_checkpoints(tmp_path)] == ["old"]
    async_save(tmp_path, "new", state, step=2, copy_in_background=True).wait()
    assert saved(tmp_path, "model.weight").sum() == 1


def test_wait_until_staged_lets_tensors_change(tmp_path):
    weight = torch.zeros(LARGE)

    handle = async_save(tmp_path, "a", {"weight": weight}, copy_in_background=True)
    handle.wait_until_staged()
    weight += 1
    handle.wait()

    assert saved(tmp_path, "weight").sum() == 0


@pytest.mark.parametrize("state", [{"weight": torch.zeros(LARGE)}, {"weight": torch.zeros(LARGE).t()[::2]}])
def test_small_tensors_and_inference_tensors_are_copied_in_the_call(tmp_path, copying, state):
    with torch.inference_mode():
        frozen = torch.zeros(LARGE)
    state = {**state, "statistics": torch.zeros(9), "frozen": frozen}

    handle = async_save(tmp_path, "a", state, copy_in_background=True)
    state["statistics"] += 1
    with torch.inference_mode():
        frozen += 1
    copying.set()
    handle.wait()

    assert saved(tmp_path, "statistics").sum() == 0
    assert saved(tmp_path, "frozen").sum() == 0
    assert torch.equal(saved(tmp_path, "weight"), state["weight"])


def test_tensors_that_do_not_fit_the_memory_are_copied_in_the_call(tmp_path, copying):
    weight = torch.zeros(LARGE)

    handle = async_save(tmp_path, "a", {"weight": weight}, copy_in_background=True, memory_limit=2**17)

    assert handle.staged
    weight += 1
    handle.wait()
    assert saved(tmp_path, "weight").sum() == 0


def test_next_save_waits_for_copies_of_the_one_before(tmp_path):
    weight = torch.zeros(LARGE)
    for step in range(3):
        handle = async_save(tmp_path, f"step-{step}", {"weight": weight}, step=step, copy_in_background=True)
        handle.wait_until_staged()
        weight += 1
    handle.wait()

    assert [open_checkpoint(tmp_path, f"step-{step}").read("weight").mean() for step in range(3)] == [0, 1, 2]
