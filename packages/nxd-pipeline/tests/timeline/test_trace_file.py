"""When and how the file of a trace and its picture are written."""

import json
import sys
import time
from itertools import pairwise

import pytest
import torch
from nxd_pipeline import insert_communication, make_schedule
from nxd_pipeline.timeline import MAX_STEPS, TraceFile, read_trace
from nxd_state import Group, initialize_model_parallel


def play(trace_file, schedule):
    with trace_file.step() as record:
        if record is not None:
            for time, action in enumerate(schedule.actions[0]):
                record(action, time, time + 1)
        return record


def test_trace_beside_one_process_has_its_microbatches(make_pipeline, tmp_path):
    model = make_pipeline(trace_file_path=str(tmp_path / "trace.json"))

    model.run_train(input=torch.randn(64, 32))

    (step,) = read_trace(tmp_path / "trace.json")
    assert [str(span.action) for span in step.timelines[0].spans[0]] == [
        f"0{kind}{microbatch}" for microbatch in range(4) for kind in "FB"
    ]
    assert step.clock_error == 0
    assert model.bubble_report().simulated == (0.0,)


def colored_bands(picture):
    """How many groups of neighbouring rows have colours in them."""
    red, green, blue = (channel.load() for channel in picture.convert("RGB").split())
    rows = [
        any(max(it[x, y] for it in (red, green, blue)) - min(it[x, y] for it in (red, green, blue)) > 40 for x in xs)
        for xs in [range(0, picture.width, 5)]
        for y in range(picture.height)
    ]
    return sum(1 for above, row in pairwise([False, *rows]) if row and not above)


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("interleaved", 4), ("zb-v", 4)])
def test_picture_has_a_lane_per_stage_and_a_legend(trace_files, schedule, num_stages):
    image = pytest.importorskip("PIL.Image")
    file, _ = trace_files[schedule]

    with image.open(file.with_suffix(".png")) as picture:
        assert colored_bands(picture) == num_stages + 1


def test_nothing_but_the_file_and_its_picture_is_left(trace_files):
    pytest.importorskip("matplotlib")
    for file, _ in trace_files.values():
        assert sorted(it.name for it in file.parent.iterdir()) == ["trace.json", "trace.png"]


def test_trace_without_matplotlib_is_written_and_says_what_to_install(make_pipeline, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    model = make_pipeline(trace_file_path=tmp_path / "trace.json")

    with pytest.warns(UserWarning, match=r"pip install nxd-pipeline\[timeline\]"):
        model.run_train(input=torch.randn(64, 32))

    assert len(read_trace(tmp_path / "trace.json")) == 1
    assert [it.name for it in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.filterwarnings("ignore:.*needs matplotlib")
@pytest.mark.parametrize(("num_microbatches", "num_steps"), [(1, MAX_STEPS), (10, 3)], ids=["steps", "events"])
def test_trace_ends_when_the_file_is_full(tmp_path, monkeypatch, num_microbatches, num_steps):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take long
    monkeypatch.setattr("nxd_pipeline.timeline.trace_file.MAX_EVENTS", 2 * 20 + 1)
    schedule = make_schedule("1f1b", 1, num_microbatches)
    trace_file = TraceFile(tmp_path / "trace.json", schedule, Group.solo("pp"))

    recorded = [play(trace_file, schedule) is not None for _ in range(num_steps + 2)]

    assert recorded == [True] * num_steps + [False] * 2
    assert trace_file.is_full
    assert trace_file.last_step.number == num_steps - 1


def test_step_that_raises_is_not_in_the_file(tmp_path):
    schedule = make_schedule("1f1b", 1, 1)
    trace_file = TraceFile(tmp_path / "trace.json", schedule, Group.solo("pp"))
    play(trace_file, schedule)

    with pytest.raises(FloatingPointError), trace_file.step():
        raise FloatingPointError

    assert len(read_trace(tmp_path / "trace.json")) == 1


def test_disk_that_fails_costs_the_trace_and_not_the_training(tmp_path, monkeypatch):
    schedule = make_schedule("1f1b", 1, 1)
    trace_file = TraceFile(tmp_path / "folder" / "trace.json", schedule, Group.solo("pp"))
    play(trace_file, schedule)
    before = (tmp_path / "folder" / "trace.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.warns(UserWarning, match="step 1 is not in .*disk full"):
            play(trace_file, schedule)

    assert (tmp_path / "folder" / "trace.json").read_bytes() == before
    play(trace_file, schedule)
    assert len(read_trace(tmp_path / "folder" / "trace.json")) == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [("folder", "is a folder"), ("file/trace.json", "cannot be written"), ("trace.png", "names a picture")],
)
def test_path_that_cannot_be_written_raises_on_every_rank(run_ranks, make_pipeline, tmp_path, path, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()

    def make():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        with pytest.raises(ValueError, match=message):
            make_pipeline(trace_file_path=tmp_path / path)

    run_ranks(make, 2)


def test_ranks_with_clocks_far_apart_are_put_on_one(run_ranks, make_pipeline, tmp_path):
    def train():
        import torch.distributed as dist

        apart = 10**12 * dist.get_rank()
        with pytest.MonkeyPatch.context() as patch:
            for module in ("timeline.traced_step", "timeline.trace_file", "runtime.executor"):
                patch.setattr(f"nxd_pipeline.{module}.perf_counter_ns", lambda: time.perf_counter_ns() + apart)
            initialize_model_parallel(pipeline_model_parallel_size=2)
            make_pipeline(trace_file_path=tmp_path / "trace.json").run_train(input=torch.randn(64, 32))

    run_ranks(train, 2)

    (step,) = read_trace(tmp_path / "trace.json")
    first, last = step.timelines[0].compute_spans
    assert last[0].start > first[0].end - step.clock_error
    assert step.timelines[0].makespan < 100  # and not the 1000 s that the clocks are apart


def test_trace_file_is_valid_json_after_each_step(tmp_path):
    schedule = insert_communication(make_schedule("1f1b", 1, 2))
    trace_file = TraceFile(tmp_path / "trace.json", schedule, Group.solo("pp"))
    for number in range(3):
        play(trace_file, schedule)
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert {event["args"]["step"] for event in events if event["ph"] == "X"} == set(range(number + 1))
