"""Recordings of programs on two ranks against recordings of one process: equal, or the fault is found and named."""

import pytest
import torch
from nxd_parity import compare, record
from nxd_parity.events import Placement
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def recorded(folder, function, *given, noise=None, **named):
    with record(folder, noise=noise):
        function(*given, **named)


@pytest.fixture
def reference(tmp_path, train):
    """A recording of one process, in float64."""
    recorded(tmp_path / "reference", train)
    return tmp_path / "reference"


def test_tensor_parallel_program_equals_one_process(run_ranks, tmp_path, reference, train, make_model):
    run_ranks(recorded, 2, tmp_path / "candidate", train)

    report = compare(reference, tmp_path / "candidate")

    assert report.agrees, str(report)
    assert (report.ranks, report.steps, report.not_compared) == (2, 2, {})
    number = len(list(make_model().parameters()))
    assert report.agree["parameter"] == 3 * number  # initial, and after each step
    assert report.agree["gradient"] == 2 * number
    assert "blocks.0.up.weight: rank 0: dim 0 0..31; rank 1: dim 0 32..63" in "".join(report.notes)


FAULTS = {
    "no sum in backward": ("activation gradient", "blocks.1.up", "missing sum"),
    "no sum in forward": ("activation", "blocks.1.down", "missing sum"),
    "summed twice": ("activation", "blocks.1.down", "summed twice"),
    "other data": ("input", "", "different data"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_tensor_parallel_program_is_located(run_ranks, tmp_path, train, fault, dtype):
    for number, name in enumerate(("reference", "noise-1", "noise-2")):
        recorded(tmp_path / name, train, dtype=dtype, noise=number or None)
    run_ranks(lambda: recorded(tmp_path / "candidate", train, fault, dtype=dtype), 2)

    spread = [tmp_path / "noise-1", tmp_path / "noise-2"] if dtype == torch.bfloat16 else []
    first = compare(tmp_path / "reference", tmp_path / "candidate", spread=spread).first

    assert first is not None
    assert (first.step, first.kind, first.name, first.fault) == (1, *FAULTS[fault])


def test_parameters_that_are_not_updated_are_stale(run_ranks, tmp_path, reference, train):
    run_ranks(recorded, 2, tmp_path / "candidate", train, "no update")

    first = compare(reference, tmp_path / "candidate").first

    assert first is not None
    assert (first.step, first.kind, first.fault) == (2, "parameter", "stale values")
    assert first.ranks == (0, 1)


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


def train_replicas(*, is_strided=False, scale=1.0):
    torch.manual_seed(0)
    model = Average().double()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
    wrapped = model if rank is None else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if rank is not None:
            x = x[rank::2] if is_strided else x.chunk(2)[rank]
        loss = wrapped(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("is_strided", [False, True])
def test_replicas_with_parts_of_the_batch_equal_one_process(run_ranks, tmp_path, is_strided):
    recorded(tmp_path / "reference", train_replicas)
    run_ranks(lambda: recorded(tmp_path / "candidate", train_replicas, is_strided=is_strided), 2)

    report = compare(tmp_path / "reference", tmp_path / "candidate")

    assert report.agrees, str(report)
    assert (
        report.agree["activation gradient"] == 2 * 5
    )  # of two steps: three layers, the module with them, and the model


def test_loss_with_another_factor_is_found(run_ranks, tmp_path):
    recorded(tmp_path / "reference", train_replicas)
    run_ranks(lambda: recorded(tmp_path / "candidate", train_replicas, scale=2.0), 2)

    first = compare(tmp_path / "reference", tmp_path / "candidate").first

    assert first is not None
    assert (first.kind, first.fault, first.factor) == ("loss", "summed twice", 2.0)


def test_candidate_that_calls_no_model_is_refused(tmp_path, reference):
    recorded(tmp_path / "candidate", lambda: None)

    with pytest.raises(ValueError, match="candidate has no tensors: no model was called"):
        compare(reference, tmp_path / "candidate")


def test_steps_that_only_one_has_and_errors_are_noted(tmp_path, reference, train):
    def fails():
        train(steps=1)
        raise KeyError

    with pytest.raises(KeyError):
        recorded(tmp_path / "candidate", fails)

    report = compare(reference, tmp_path / "candidate")

    assert report.agrees
    assert report.notes[0] == "the reference has 2 steps: those after step 1 were not compared"
    assert report.notes[1] == "rank 0 of the candidate raised an error while it was recorded"


def test_rule_that_matches_no_parameter_is_noted(reference):
    report = compare(reference, reference, shards={"*.weigth": 1, "*": 0})

    assert report.notes == ["no parameter whose part had to be found is called '*.weigth': the rule was not used"]


@pytest.mark.parametrize("rtol", [float("nan"), float("inf"), -1.0])
def test_tolerance_that_is_none_is_refused(reference, rtol):
    with pytest.raises(ValueError, match=r"rtol=.*; pass a finite number that is not negative"):
        compare(reference, reference, rtol=rtol)


def test_recording_that_lacks_a_rank_is_refused(run_ranks, tmp_path, reference, train):
    run_ranks(recorded, 2, tmp_path / "candidate", train)
    (tmp_path / "candidate" / "rank-00000").rename(tmp_path / "elsewhere")

    with pytest.raises(ValueError, match="lacks the recording of rank 0; copy the folders of all ranks"):
        compare(reference, tmp_path / "candidate")


@pytest.fixture
def record_by_hand(tmp_path, monkeypatch):
    """Records a weight of 6 rows and a loss of 1, as one process and as ranks that have boxes of the weight."""

    def record_ranks(name, boxes_of_ranks, losses):
        for rank, (boxes, loss) in enumerate(zip(boxes_of_ranks, losses, strict=True)):
            monkeypatch.setenv("RANK", str(rank))
            with record(tmp_path / name, by_hand=True) as recorder:
                for step in range(2):
                    for part, (start, values) in enumerate(boxes):
                        place = Placement((6,), (start,))
                        recorder.tensor("parameter", "weight", values, placement=place, part=part)
                    if step == 0:
                        recorder.tensor("loss", "", torch.tensor(loss), placement=Placement((), ()))
                        recorder.end_step()
        return tmp_path / name

    return record_ranks


@pytest.mark.parametrize(
    ("boxes", "losses", "expected"),
    [
        ([[(0, (0.0, 1.0)), (4, (4.0, 5.0))], [(2, (2.0, 3.0))]], [1.0, 1.0], None),
        ([[(0, (0.0, 1.0)), (4, (9.0, 5.0))], [(2, (2.0, 3.0))]], [1.0, 1.0], ("parameter", "different values", (4,))),
        ([[(0, (0.0, 1.0))], [(2, (2.0, 3.0))]], [1.0, 1.0], ("parameter", "wrong shard or order", ())),
        ([[(0, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0))]] * 2, [0.0, 2.0], ("loss", "missing sum", ())),
    ],
    ids=["right", "wrong box", "box that nobody has", "losses whose mean alone is right"],
)
def test_boxes_that_a_program_states_are_compared_with_their_part(record_by_hand, boxes, losses, expected):
    reference = record_by_hand("one", [[(0, torch.arange(6.0))]], [1.0])

    report = compare(
        reference,
        record_by_hand("ranks", [[(start, torch.tensor(it)) for start, it in of_rank] for of_rank in boxes], losses),
    )

    found = report.first
    assert (None if found is None else (found.kind, found.fault, found.index)) == expected, report


def test_outputs_of_a_model_that_is_not_trained_are_compared(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    recorded(tmp_path / "right", model, torch.ones(2, 4))
    recorded(tmp_path / "again", model, torch.ones(2, 4))
    with torch.no_grad():
        model[0].bias += 1
    recorded(tmp_path / "wrong", model, torch.ones(2, 4))

    assert compare(tmp_path / "right", tmp_path / "again").agrees
    report = compare(tmp_path / "right", tmp_path / "wrong")
    assert [it.name for it in report.findings[:2]] == ["0.bias", "0"]


def test_outputs_alone_that_differ_are_found(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    recorded(tmp_path / "right", model, torch.ones(2, 4))
    model[1] = nn.Hardtanh()
    recorded(tmp_path / "wrong", model, torch.ones(2, 4))

    found = compare(tmp_path / "right", tmp_path / "wrong").first

    assert (found.step, found.kind, found.name) == (1, "activation", "1")
