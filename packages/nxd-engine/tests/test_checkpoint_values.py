"""Tags, arguments, retention and a script's own values, in one process."""

import os
import pickle
import time

import pytest
import torch
from nxd_ckpt import CheckpointError, list_checkpoints, open_checkpoint, pin, save
from nxd_engine.checkpoints.find import has_checkpoint
from nxd_engine.checkpoints.load import load_checkpoint
from nxd_engine.checkpoints.save import save_checkpoint
from torch import nn


class Runs:
    """Whatever it is, unpickling it runs a command."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


def tags(root):
    return [info.tag for info in list_checkpoints(root)]


@pytest.mark.parametrize(
    "content",
    [None, {"total_steps": 7}, [1, 2.5, None, "text"], (1, 2), {3: "by number"}, torch.arange(4), float("inf")],
    ids=repr,
)
def test_user_content_comes_back_as_it_was(tmp_path, content):
    save_checkpoint(tmp_path, "a", user_content=content, nxd_config={})

    found = load_checkpoint(tmp_path)

    assert type(found) is type(content)
    assert torch.equal(found, content) if isinstance(content, torch.Tensor) else found == content


def test_plain_values_are_readable_without_torch(tmp_path):
    save_checkpoint(tmp_path, "a", user_content={"total_steps": 7})

    assert open_checkpoint(tmp_path, "a").objects == {"user_content": {"total_steps": 7}}
    assert open_checkpoint(tmp_path, "a").extra == []


def test_user_content_that_would_run_code_is_refused_when_it_is_saved(tmp_path):
    marker = tmp_path / "marker"

    with pytest.raises(ValueError, match=r"user_content asks for .*system"):
        save_checkpoint(tmp_path / "runs", "a", user_content=Runs(marker))

    assert not has_checkpoint(tmp_path / "runs")
    assert not marker.exists()


def test_user_content_that_would_run_code_is_refused_when_it_is_loaded(tmp_path):
    marker = tmp_path / "marker"
    save(tmp_path / "runs", "a", {}, extra={"user_content.pt": pickle.dumps(Runs(marker))})

    with pytest.raises(CheckpointError, match=r"user_content.pt of checkpoint 'a'"):
        load_checkpoint(tmp_path / "runs")

    assert not marker.exists()


def test_newest_checkpoint_is_loaded_without_a_tag(tmp_path):
    for tag in ("step_20", "step_3"):
        save_checkpoint(tmp_path, tag, user_content=tag)

    assert load_checkpoint(tmp_path) == "step_3"
    assert load_checkpoint(tmp_path, "step_20") == "step_20"


def test_without_a_tag_the_path_becomes_the_checkpoint(tmp_path):
    root = tmp_path / "ckpts"
    assert not has_checkpoint(root)

    for total_steps in (1, 2):
        save_checkpoint(root, nxd_config={}, user_content={"total_steps": total_steps})

    assert has_checkpoint(root)
    assert load_checkpoint(root) == {"total_steps": 2}


def test_without_a_tag_a_folder_of_checkpoints_is_not_overwritten(tmp_path):
    save_checkpoint(tmp_path, "a", user_content=1)

    with pytest.raises(CheckpointError, match="holds the checkpoints a; pass tag="):
        save_checkpoint(tmp_path)

    assert load_checkpoint(tmp_path) == 1


def test_without_a_tag_nothing_beside_the_checkpoint_is_dropped(tmp_path):
    for run in ("one", "two"):
        save_checkpoint(tmp_path / run, user_content=run, num_kept_ckpts=1)

    assert [load_checkpoint(tmp_path / run) for run in ("one", "two")] == ["one", "two"]


@pytest.mark.parametrize(
    ("path", "tag", "message"),
    [
        ("", "", "path='' is not a folder of checkpoints"),
        (None, "a", "path=None is not a folder"),
        (b"runs", "a", "path=b'runs' is not a folder"),
        ("runs", 0, "tag=0 is a int; pass a string, such as 'step_0'"),
        ("runs", 7, "tag=7 is a int"),
    ],
)
def test_what_is_no_path_or_tag_is_refused(tmp_path, monkeypatch, path, tag, message):
    monkeypatch.chdir(tmp_path)

    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(CheckpointError, match=message):
            call(path, tag)

    assert list(tmp_path.iterdir()) == []


def test_file_is_no_folder_of_checkpoints(tmp_path):
    file = tmp_path / "model.pt"
    file.touch()

    assert not has_checkpoint(file)
    with pytest.raises(CheckpointError, match=r"model\.pt is a file; pass the folder"):
        load_checkpoint(file)


def test_missing_checkpoints_are_errors_that_say_so(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint 'b'"):
        load_checkpoint(tmp_path, "b")
    save_checkpoint(tmp_path, "a")
    with pytest.raises(CheckpointError, match=r"no checkpoint 'b'.*available: a"):
        load_checkpoint(tmp_path, "b")


@pytest.mark.parametrize("folder", ["", "absent"])
def test_script_that_resumes_by_itself_begins_where_nothing_is_saved_yet(tmp_path, caplog, folder):
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()

    content = load_checkpoint(tmp_path / folder, model=model)

    assert content is None
    assert torch.equal(model.weight, before)
    assert "no complete checkpoint in" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [None, 7])
def test_num_kept_ckpts_keeps_what_was_saved_last_whatever_clock_and_steps_say(tmp_path, monkeypatch, step):
    save(tmp_path, "train", {}, step=step)
    monkeypatch.setattr(time, "time", lambda: 1e9)

    for tag in ("b", "a"):
        save_checkpoint(tmp_path, tag, user_content=tag, num_kept_ckpts=1)

        assert tags(tmp_path) == [tag]
        assert load_checkpoint(tmp_path) == tag


@pytest.mark.parametrize(("kept", "expected"), [(None, "abcd"), (-1, "abcd"), (2, "acd"), (1, "ad")])
def test_num_kept_ckpts_keeps_the_newest_and_pinned_ones(tmp_path, kept, expected):
    save_checkpoint(tmp_path, "a")
    pin(tmp_path, "a")
    (tmp_path / "foreign").mkdir()

    for tag in "bcd":
        save_checkpoint(tmp_path, tag, num_kept_ckpts=kept)

    assert tags(tmp_path) == list(expected)
    assert (tmp_path / "foreign").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_kept_ckpts": 0}, "num_kept_ckpts=0"),
        ({"num_workers": 33}, "num_workers=33"),
        ({"model": {"weight": torch.zeros(1)}}, "model is a dict"),
        ({"optimizer": 3}, "optimizer is a int"),
        ({"scheduler": 3}, "scheduler is a int"),
    ],
)
def test_wrong_argument_is_named_and_nothing_is_written(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, "a", **arguments)

    assert tags(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": {"state": {}}}, "optimizer is a dict; pass the optimizer itself"),
        ({"scheduler": nn.Linear(1, 1).state_dict}, "without load_state_dict"),
        ({"num_workers": 0}, "num_workers=0"),
    ],
)
def test_what_cannot_be_filled_is_refused_before_anything_is(tmp_path, arguments, message):
    save_checkpoint(tmp_path, "a", nn.Linear(1, 1))
    model = nn.Linear(1, 1)
    before = model.weight.clone()

    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, model=model, **arguments)

    assert torch.equal(model.weight, before)


def test_names_of_modules_may_have_slashes(tmp_path):
    saved, other = (nn.ModuleDict({"a/b": nn.Linear(2, 2)}) for _ in range(2))
    save_checkpoint(tmp_path, "x", saved)

    load_checkpoint(tmp_path, model=other)

    assert torch.equal(other["a/b"].weight, saved["a/b"].weight)


def test_strict_compares_names_and_without_it_what_both_have_is_loaded(tmp_path):
    saved = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    other = nn.ModuleDict({"b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    save_checkpoint(tmp_path, "x", saved)

    with pytest.raises(CheckpointError, match=r"it lacks c.bias, c.weight; the model lacks a.bias, a.weight"):
        load_checkpoint(tmp_path, model=other)
    load_checkpoint(tmp_path, model=other, strict=False)

    assert torch.equal(other["b"].weight, saved["b"].weight)


def test_checkpoint_of_another_dtype_is_converted(tmp_path):
    saved, other = nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16)
    save_checkpoint(tmp_path, "x", saved)

    load_checkpoint(tmp_path, model=other)

    assert torch.equal(other.weight, saved.weight.bfloat16())


def make_optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("as_dict", [False, True], ids=["optimizer without a model", "state_dict"])
def test_optimizer_state_without_names_comes_back(tmp_path, as_dict):
    model = nn.Linear(3, 3)
    optimizer, other = make_optimizer(model), torch.optim.AdamW(nn.Linear(3, 3).parameters(), lr=0.5)
    save_checkpoint(tmp_path, "x", optimizer=optimizer.state_dict() if as_dict else optimizer)

    load_checkpoint(tmp_path, optimizer=other)

    expected, found = optimizer.state_dict(), other.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(found["state"][number][key], value)


def test_settings_of_an_optimizer_go_by_the_names_of_its_parameters(tmp_path):
    model = nn.Linear(3, 3)
    saved = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    swapped = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=torch.tensor(1.0))
    together = torch.optim.SGD(model.parameters(), lr=1.0)
    save_checkpoint(tmp_path, "x", model, saved)

    load_checkpoint(tmp_path, model=model, optimizer=swapped)

    assert [float(group["lr"]) for group in swapped.param_groups] == pytest.approx([0.2, 0.1])
    with pytest.raises(CheckpointError, match="saved in groups with different settings"):
        load_checkpoint(tmp_path, model=model, optimizer=together)


def layers(*, value, frozen):
    """Two layers, the first of which may be frozen; all weights have the value."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for weight in model.parameters():
        nn.init.constant_(weight, value)
    return model if not frozen else nn.Sequential(model[0].requires_grad_(False), model[1])


def test_checkpoint_without_frozen_weights_fills_those_that_train(tmp_path):
    save_checkpoint(tmp_path, "a", layers(value=1.0, frozen=True), frozen_weights=False)
    model = layers(value=0.0, frozen=True)

    load_checkpoint(tmp_path, "a", model)

    assert [float(weight.sum()) for weight in model.parameters()] == [0.0, 4.0]
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        load_checkpoint(tmp_path, "a", layers(value=0.0, frozen=False))
