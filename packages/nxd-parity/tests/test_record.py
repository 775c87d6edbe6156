"""What a recording of a program has, and that the program is unchanged by it."""

import json
import multiprocessing
import os
import shutil
import warnings

import pytest
import torch
from nxd_parity import InFloat64, compare, record
from nxd_parity.events import Placement
from nxd_parity.recording import Recording
from nxd_parity.writer import RankWriter
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint


def train_small(model, steps=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.full((2, 4), float(step + 1))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_kinds_of_tensors_in_the_order_of_a_step(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    with record(tmp_path / "run"):
        train_small(model)

    found = [(it.step, it.kind, it.name) for it in Recording(tmp_path / "run").tensors[0]]
    states = [f"0.{name}/{state}" for name in ("weight", "bias") for state in ("step", "exp_avg", "exp_avg_sq")]
    assert found == [
        (0, "parameter", "0.weight"),
        (0, "parameter", "0.bias"),
        (1, "input", "0"),
        (1, "activation", "0"),
        (1, "activation", "1"),
        (1, "input", ""),
        (1, "activation", ""),
        (1, "loss", ""),
        (1, "activation gradient", "1"),
        (1, "activation gradient", ""),
        (1, "activation gradient", "0"),
        (1, "gradient", "0.weight"),
        (1, "gradient", "0.bias"),
        *((1, "optimizer state", name) for name in states),
        (1, "parameter", "0.weight"),
        (1, "parameter", "0.bias"),
    ]


def test_values_are_those_of_the_program(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    before = model[0].weight.detach().clone()

    with record(tmp_path / "run"):
        train_small(model)

    recording = Recording(tmp_path / "run")
    of_kind = {(it.step, it.kind, it.name): recording.read(0, it) for it in recording.tensors[0]}
    assert torch.equal(of_kind[0, "parameter", "0.weight"], before)
    assert torch.equal(of_kind[1, "parameter", "0.weight"], model[0].weight)
    assert torch.equal(of_kind[1, "input", ""], torch.ones(2, 4))


def test_recorded_program_computes_the_same_bits(tmp_path):
    def weights():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Tanh())
        train_small(model, steps=3)
        return model.state_dict()

    expected = weights()
    with record(tmp_path / "run"):
        found = weights()

    assert all(torch.equal(found[name], it) for name, it in expected.items())


def test_equal_tensors_are_written_once(tmp_path):
    model = nn.Linear(64, 64)
    model.weight.requires_grad_(False)

    with record(tmp_path / "run"):
        train_small(nn.Sequential(nn.Linear(4, 64), model), steps=4)

    tensors = Recording(tmp_path / "run").tensors[0]
    assert len({(it.file, it.key) for it in tensors if it.name == "1.weight" and it.kind == "parameter"}) == 1


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_modules_that_run_again_in_backward_are_recorded_once(tmp_path):
    with record(tmp_path / "run"):
        train_small(nn.Sequential(nn.Linear(4, 4), Checkpointed()))

    found = [it.kind for it in Recording(tmp_path / "run").tensors[0] if it.name == "1.inner"]
    assert sorted(found) == ["activation", "activation gradient"]


def test_noise_changes_outputs_by_a_few_units_in_the_last_place(tmp_path):
    def outputs(folder, noise):
        torch.manual_seed(0)
        with record(folder, noise=noise):
            train_small(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))
        recording = Recording(folder)
        (event,) = [it for it in recording.tensors[0] if (it.kind, it.name) == ("activation", "")]
        return recording.read(0, event)

    plain, first, second = (outputs(tmp_path / str(it), it) for it in (None, 1, 2))

    assert not torch.equal(plain, first)
    assert not torch.equal(first, second)
    torch.testing.assert_close(plain, first, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-7)


def test_collectives_are_recorded_in_their_order(run_ranks, tmp_path, train):
    def run(folder):
        with record(folder):
            train(steps=1)

    run_ranks(run, 2, tmp_path / "run")

    for of_rank in Recording(tmp_path / "run").collectives:
        assert {(it.operation, it.ranks, it.reduction) for it in of_rank} == {("all_reduce", (0, 1), "SUM")}
        assert len(of_rank) == 6  # of three blocks, in forward and backward


def test_program_that_raises_keeps_what_was_recorded(tmp_path):
    def failing():
        with record(tmp_path / "run"):
            train_small(nn.Linear(4, 4))
            raise RuntimeError("of the program")

    with pytest.raises(RuntimeError, match="of the program"):
        failing()

    assert {it.kind for it in Recording(tmp_path / "run").tensors[0]} >= {"activation", "gradient"}
    assert not nn.modules.module._global_forward_hooks


def test_folder_with_a_recording_is_refused(tmp_path):
    with record(tmp_path / "run"):
        train_small(nn.Linear(4, 4))

    with (
        pytest.raises(FileExistsError, match="rank-00000 is there already; record to a new folder"),
        record(tmp_path / "run"),
    ):
        pass


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"step": 1}', '{"step": -1, "kind": "loss"}', '{"operation": 3, "step": 1}', "[" * 100_000],
    ids=["list", "cut", "no kind", "negative", "number", "nested"],
)
def test_damaged_line_is_an_error_that_names_it(tmp_path, line):
    with record(tmp_path / "run"):
        train_small(nn.Linear(4, 4))
    path = tmp_path / "run" / "rank-00000" / "events.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")

    with pytest.raises(ValueError, match=r"events.jsonl, line \d+: .* is not a line of a recording"):
        _ = Recording(tmp_path / "run").tensors


def test_tensors_that_are_cut_off_are_an_error(tmp_path):
    with record(tmp_path / "run"):
        train_small(nn.Linear(4, 4))
    path = tmp_path / "run" / "rank-00000" / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))

    with pytest.raises(ValueError, match=rf"events.jsonl has 3 of {len(lines)} tensors: it was cut off"):
        _ = Recording(tmp_path / "run").tensors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not the description of a recording"),
        ("[" * 100_000, "is not the description of a recording"),
        ("[]", "is of format '\\[\\]'; this nxd-parity reads format 1"),
        ('{"format": 2}', "is of format '2'; this nxd-parity reads format 1"),
        ('{"format": 1, "world_size": 3}', "lacks the recording of rank 1 of 3; copy the folders of all ranks"),
    ],
    ids=["empty", "nested", "list", "later format", "other ranks"],
)
def test_description_that_does_not_fit_is_an_error(tmp_path, text, message):
    with record(tmp_path / "run"):
        train_small(nn.Linear(4, 4))
    (tmp_path / "run" / "rank-00000" / "recording.json").write_text(text)

    with pytest.raises(ValueError, match=message):
        Recording(tmp_path / "run")


def test_values_that_are_no_file_are_an_error(tmp_path):
    with record(tmp_path / "run"):
        train_small(nn.Linear(4, 4))
    path = tmp_path / "run" / "rank-00000" / "tensors-00000.safetensors"
    path.unlink()
    os.mkfifo(path)  # which nobody writes to
    recording = Recording(tmp_path / "run")

    with pytest.raises(ValueError, match="is missing; copy the folders of all ranks whole"):
        recording.read(0, recording.tensors[0][0])


def test_tensor_that_is_not_the_recorded_one_is_an_error(tmp_path):
    with record(tmp_path / "run"):
        train_small(nn.Linear(4, 4))
    path = tmp_path / "run" / "rank-00000" / "events.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps(json.loads(first) | {"shape": [400, 4]}) + "\n", *others]))
    recording = Recording(tmp_path / "run")

    with pytest.raises(ValueError, match=r"was recorded as torch.float32 \[400, 4\]"):
        recording.read(0, recording.tensors[0][0])


class RaisesOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("out of luck")
        return self.inner(x)


def test_module_that_raises_leaves_the_next_call_as_it_is(tmp_path):
    model = RaisesOnce()

    with record(tmp_path / "run"):
        with pytest.raises(RuntimeError, match="out of luck"):
            model(torch.ones(2, 4))
        train_small(model)

    found = [it.name for it in Recording(tmp_path / "run").tensors[0] if it.kind == "activation"]
    assert found == ["inner", ""]


def test_recording_of_a_number_of_steps_leaves_the_rest_alone(tmp_path):
    with record(tmp_path / "run", steps=2):
        train_small(nn.Linear(4, 4), steps=5)
        assert not nn.modules.module._global_forward_hooks

    tensors = Recording(tmp_path / "run").tensors[0]
    assert max(it.step for it in tensors) == 2
    assert {it.kind for it in tensors if it.step == 2} >= {"activation", "gradient", "parameter"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0; record at least 1"),
        ({"steps": 1.5}, "steps=1.5; record at least 1"),
        ({"noise": -1}, "noise=-1 is no seed"),
        ({"noise": "1"}, "noise='1' is no seed"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message), record(tmp_path / "run", **arguments):
        pass

    assert not list(tmp_path.iterdir())


def test_recording_without_a_folder_is_refused():
    with pytest.raises(ValueError, match="folder='' is no folder"), record(""):
        pass


def test_rank_that_records_alone_leaves_a_recording_of_one_process(run_ranks, tmp_path):
    def recorded():
        if torch.distributed.get_rank() == 1:
            with record(tmp_path / "reference", alone=True):
                train_small(nn.Linear(4, 4))

    run_ranks(recorded, 2)

    assert Recording(tmp_path / "reference").world_size == 1


def test_fork_of_a_recorded_process_writes_nothing(tmp_path):
    model = nn.Linear(4, 4)

    with record(tmp_path / "run"):
        train_small(model)
        fork = multiprocessing.get_context("fork").Process(target=model, args=(torch.ones(4),))
        fork.start()
        fork.join()

    assert fork.exitcode == 0
    assert [it.step for it in Recording(tmp_path / "run").tensors[0] if it.kind == "activation"] == [1]


def test_losses_are_recorded_in_float64(tmp_path):
    with InFloat64(), record(tmp_path / "run"):
        train_small(nn.Linear(4, 4))

    (loss,) = [it for it in Recording(tmp_path / "run").tensors[0] if it.kind == "loss"]
    assert loss.dtype == torch.float64


def test_what_a_program_gives_by_hand_replaces_what_hooks_record(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    place = Placement((6, 4), (3, 0))

    with record(tmp_path / "run", by_hand=True) as recorder:
        recorder.tensor("parameter", "whole.weight", model.weight[:2], placement=Placement((6, 4), (3, 0)))
        recorder.tensor("parameter", "whole.weight", model.weight[2:], placement=Placement((6, 4), (5, 0)), part=1)
        train_small(model)
        recorder.tensor("loss", "", torch.tensor(2.0))
        recorder.end_step()
        recorder.tensor("parameter", "whole.weight", model.weight, placement=place)

    found = Recording(tmp_path / "run").tensors[0]
    assert [(it.step, it.kind, it.name, it.call) for it in found] == [
        (0, "parameter", "whole.weight", 0),
        (0, "parameter", "whole.weight", 1),
        (1, "input", "", 0),
        (1, "activation", "", 0),
        (1, "activation gradient", "", 0),
        (1, "loss", "", 0),
        (1, "parameter", "whole.weight", 0),
    ]
    assert [it.placement.start for it in found if it.kind == "parameter"] == [(3, 0), (5, 0), (3, 0)]


def test_unknown_kind_of_a_program_is_refused(tmp_path):
    with (
        record(tmp_path / "run", by_hand=True) as recorder,
        pytest.raises(ValueError, match=r"kind='weights' is none of 'input', 'activation'"),
    ):
        recorder.tensor("weights", "0", torch.ones(1))


def test_modules_that_a_program_leaves_out_are_not_recorded(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    with record(tmp_path / "run", modules_of=lambda it: list(it.named_modules())[:2]):
        train_small(model)

    found = {it.name for it in Recording(tmp_path / "run").tensors[0] if it.kind == "activation"}
    assert found == {"", "0"}


def test_memory_of_a_recorded_parameter_can_be_given_up(tmp_path):
    model = nn.Linear(4, 3)

    with record(tmp_path / "run"):
        model(torch.ones(2, 4))
        model.weight.untyped_storage().resize_(0)  # as sharding does between layers

    assert model.weight.untyped_storage().nbytes() == 0


def test_gradients_that_an_optimizer_lets_its_closure_compute_are_recorded(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with record(tmp_path / "run"):
        optimizer.step(closure)

    recording = Recording(tmp_path / "run")
    of_kind = {(it.kind, it.name): recording.read(0, it) for it in recording.tensors[0]}
    assert torch.equal(of_kind["gradient", "weight"], model.weight.grad)


def test_norm_of_a_function_imported_by_its_name_is_recorded(tmp_path):
    model, before = nn.Linear(4, 4), clip_grad_norm_

    with record(tmp_path / "run"):
        model(torch.ones(2, 4)).sum().backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)

    (event,) = [it for it in Recording(tmp_path / "run").tensors[0] if it.kind == "gradient norm"]
    assert event.largest == norm.item()
    assert clip_grad_norm_ is before


def test_tensors_that_differ_by_signs_or_order_or_type_are_all_written(tmp_path):
    values = torch.arange(1.0, 20_001.0, dtype=torch.float64)
    flipped, swapped, moved = values.clone(), values.clone(), values.clone()
    flipped[[3, 9_000]] *= -1
    swapped[[3, 9_000]] = swapped[[9_000, 3]]
    moved[19_999] += 1e-9
    others = [flipped, swapped, moved, values.view(100, 200), values.view(torch.int64).double(), values[1:], values]

    writer = RankWriter(tmp_path / "run", 0)
    for value in [values, *others]:
        writer.tensor(1, "activation", "", value)
    writer.close()

    recording = Recording(tmp_path / "run")
    for value, event in zip([values, *others], recording.tensors[0], strict=True):
        assert torch.equal(recording.read(0, event), value)
        assert event.largest == value.abs().max()
    assert recording.tensors[0][0].key == recording.tensors[0][-1].key


@pytest.mark.parametrize("elements", [2**18, 2**23, 17 * 2**20], ids=["2 MiB", "a whole file", "more than a file"])
def test_large_tensors_are_read_as_they_were_written(tmp_path, elements):
    value = torch.arange(elements, dtype=torch.float64 if elements < 2**24 else torch.float32)
    small = torch.tensor([True, False, True])

    writer = RankWriter(tmp_path / "run", 0)
    for it in (small, value, value.bfloat16().view(2, -1).T, small.int()):
        writer.tensor(1, "activation", "", it)
    writer.close()

    recording = Recording(tmp_path / "run")
    found = [recording.read(0, it) for it in recording.tensors[0]]
    for it, expected in zip(found, (small, value, value.bfloat16().view(2, -1).T, small.int()), strict=True):
        assert torch.equal(it, expected)


def test_values_that_cannot_be_written_are_an_error_of_the_recording(tmp_path):
    writer = RankWriter(tmp_path / "run", 0)
    writer.tensor(1, "activation", "", torch.ones(3))
    shutil.rmtree(tmp_path / "run")

    with pytest.raises(FileNotFoundError, match="tensors-00000"):
        writer.close()


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_program_without_an_optimizer_of_torch_is_told_that_it_has_no_steps(tmp_path, has_optimizer):
    def train(folder):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as seen, record(folder):
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(4, 3)).sum().backward()
                if has_optimizer:
                    optimizer.step()
        return any("no torch.optim.Optimizer stepped" in str(it.message) for it in seen)

    assert [train(tmp_path / it) for it in ("one", "other")] == [not has_optimizer] * 2
    notes = compare(tmp_path / "one", tmp_path / "other").notes
    assert sum("no optimizer of torch stepped" in it for it in notes) == (0 if has_optimizer else 2)
