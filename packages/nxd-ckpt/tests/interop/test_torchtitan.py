"""The mixin for torchtitan's checkpointer, in front of a class that makes the calls that torchtitan's makes."""

import enum
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nxd_ckpt import list_checkpoints
from nxd_ckpt.interop.torchtitan import NxdCheckpoints


class AsyncMode(enum.StrEnum):
    DISABLED = "disabled"
    ASYNC = "async"


class Model:
    """As torchtitan's wrapper: its state is flat, so it wants it back."""

    def __init__(self, seed):
        self.weight = torch.full((4, 3), float(seed))

    def state_dict(self):
        return {"weight": self.weight.clone()}

    def load_state_dict(self, state):
        self.weight = state["weight"]


class Count:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"count": torch.tensor(self.value), "name": "words"}

    def load_state_dict(self, state):
        self.value = int(state["count"])


class Manager:
    """What the mixin needs of torchtitan 0.3's CheckpointManager."""

    def __init__(self, folder, mode, keep, seed):
        self.folder, self.mode, self.keep_latest_k = str(folder), mode, keep
        self.pg = dist.group.WORLD if mode is AsyncMode.ASYNC else None
        self.stager = None
        self.states = {"model": Model(seed), "train_state": Count(seed)}

    def save(self, step):
        path = os.path.join(self.folder, f"step-{step}")
        future = self.dcp_save(self.flat(), checkpoint_id=path, async_mode=self.mode, enable_garbage_collection=True)
        self._purge_stale_checkpoints()
        if self.mode is AsyncMode.ASYNC:
            future.result()

    def load(self):
        step = self._find_load_step()
        path = os.path.join(self.folder, f"step-{step}")
        self.dcp_load(self.flat(), checkpoint_id=path, from_hf=False, from_quantized=False)
        return step

    def flat(self):
        return {**self.states["model"].state_dict(), "train_state": self.states["train_state"]}

    def dcp_save(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection=False, to_hf=False):
        return "Hugging Face" if to_hf else dcp.save(state_dict, checkpoint_id=checkpoint_id)

    def dcp_load(self, state_dict, checkpoint_id, from_hf, from_quantized):
        dcp.load(state_dict, checkpoint_id=checkpoint_id)
        self.states["model"].load_state_dict(state_dict)

    def _find_load_step(self, folder=""):
        names = os.listdir(folder or self.folder)
        return max([int(name[5:]) for name in names if os.path.isfile(f"{self.folder}/{name}/.metadata")], default=-1)

    def _purge_stale_checkpoints(self):
        raise AssertionError("torchtitan removes folders file by file")


class Checkpoints(NxdCheckpoints, Manager):
    pass


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", AsyncMode)
def test_torchtitan_saves_finds_loads_and_removes_checkpoints(tmp_path, mode):
    manager = Checkpoints(tmp_path, mode, keep=2, seed=5)
    for step in range(10, 60, 10):
        manager.states["train_state"].value = step
        manager.save(step)
    assert [(info.tag, info.step) for info in list_checkpoints(tmp_path)] == [
        ("step-30", 30),
        ("step-40", 40),
        ("step-50", 50),
    ]

    other = Checkpoints(tmp_path, mode, keep=0, seed=0)
    assert other.load() == 50
    assert torch.equal(other.states["model"].weight, torch.full((4, 3), 5.0))
    assert other.states["train_state"].value == 50


def test_folder_without_checkpoints_is_a_fresh_start(tmp_path):
    assert Checkpoints(tmp_path, AsyncMode.DISABLED, keep=0, seed=0)._find_load_step() == -1


def test_checkpoint_that_torch_wrote_is_loaded_and_a_newer_one_of_ours_comes_first(tmp_path):
    Manager(tmp_path, AsyncMode.DISABLED, keep=0, seed=3).dcp_save(
        {"weight": torch.full((4, 3), 3.0), "train_state": Count(3)}, str(tmp_path / "step-7"), AsyncMode.DISABLED
    )

    other = Checkpoints(tmp_path, AsyncMode.DISABLED, keep=0, seed=0)
    assert other.load() == 7
    assert other.states["train_state"].value == 3
    other.save(8)
    assert Checkpoints(tmp_path, AsyncMode.DISABLED, keep=0, seed=0).load() == 8


def test_hugging_faces_format_is_left_to_torchtitan(tmp_path):
    manager = Checkpoints(tmp_path, AsyncMode.DISABLED, keep=0, seed=0)
    assert manager.dcp_save({}, str(tmp_path / "step-1"), AsyncMode.DISABLED, to_hf=True) == "Hugging Face"
