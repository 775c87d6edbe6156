"""What the file of a trace says, and that it is what the ranks played."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from nxd_pipeline import insert_communication, make_schedule
from nxd_pipeline.schedules import RECEIVES, SENDS, parse_action
from nxd_pipeline.timeline import read_trace

RANKS, STEPS, MICROBATCHES = 2, 2, 4


def played(trace):
    name = trace["otherData"]["schedule"]
    return insert_communication(make_schedule(name, RANKS, MICROBATCHES))


def slices(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_trace_has_only_events_of_the_format(trace):
    for event in trace["traceEvents"]:
        assert event["ph"] in {"X", "M", "s", "f"}
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["args"]
        else:
            assert isinstance(event["tid"], int)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["cname"]


def test_trace_has_each_action_of_each_rank_once_per_step(trace):
    found = Counter((it["pid"], it["args"]["step"], it["args"]["action"]) for it in slices(trace))

    expected = {
        (rank, step, str(action))
        for step in range(STEPS)
        for rank, actions in enumerate(played(trace).actions)
        for action in actions
    }
    assert found == Counter(expected)


def test_trace_has_a_named_lane_per_stage_and_lanes_for_waits_and_sends(trace):
    schedule = played(trace)
    names = {(it["pid"], it["tid"]): it["args"]["name"] for it in trace["traceEvents"] if it["name"] == "thread_name"}

    for event in slices(trace):
        kind = parse_action(event["args"]["action"]).kind
        lane = "waits" if kind in RECEIVES else "sends" if kind in SENDS else f"stage {event['args']['stage']}"
        assert names[event["pid"], event["tid"]] == lane
        assert event["name"].endswith(f" {event['args']['microbatch']}")
    stages = [(rank, f"stage {stage}") for rank in range(RANKS) for stage in schedule.stages_of(rank)]
    assert sorted((rank, name) for (rank, _), name in names.items() if name.startswith("stage")) == sorted(stages)


def test_order_of_each_lane_is_that_of_the_schedule(trace):
    schedule = played(trace)
    for step in range(STEPS):
        for rank, actions in enumerate(schedule.actions):
            computed = [
                event
                for event in slices(trace)
                if (event["pid"], event["args"]["step"], event["cat"]) == (rank, step, "compute")
            ]
            by_time = [event["args"]["action"] for event in sorted(computed, key=lambda event: event["ts"])]
            assert by_time == [str(action) for action in actions if not action.is_communication]
            for first, second in pairwise(computed):
                assert first["ts"] + first["dur"] <= second["ts"] + 0.01  # rounded to nanoseconds


def test_waits_end_after_the_matching_send_began(trace):
    errors = trace["otherData"]["clock_errors_in_microseconds"]
    of_action = {(event["args"]["step"], event["args"]["action"]): event for event in slices(trace)}
    waits = [key for key in of_action if parse_action(key[1]).kind in RECEIVES]
    assert waits
    for step, action in waits:
        wait, send = of_action[step, action], of_action[step, str(parse_action(action).counterpart())]
        assert wait["ts"] + wait["dur"] >= send["ts"] - errors[step]


def test_each_message_has_an_arrow_from_its_send_to_its_wait(trace):
    starts = Counter(event["id"] for event in trace["traceEvents"] if event["ph"] == "s")
    ends = Counter(event["id"] for event in trace["traceEvents"] if event["ph"] == "f")

    num_sends = sum(action.kind in SENDS for actions in played(trace).actions for action in actions)
    assert starts == ends
    assert len(starts) == sum(starts.values()) == STEPS * num_sends


def test_arrows_begin_and_end_within_the_event_of_their_message(trace):
    messages = [event for event in slices(trace) if event["cat"] == "message"]
    for arrow in (event for event in trace["traceEvents"] if event["ph"] in "sf"):
        step, _, send = arrow["id"].split("/")
        action = send if arrow["ph"] == "s" else str(parse_action(send).counterpart())
        enclosing = [
            (str(it["args"]["step"]), it["args"]["action"])
            for it in messages
            if (it["pid"], it["tid"]) == (arrow["pid"], arrow["tid"]) and it["ts"] <= arrow["ts"] < it["ts"] + it["dur"]
        ]
        assert enclosing == [(step, action)]


def test_trace_of_several_pipelines_has_all_ranks(file_of_two_pipelines):
    (step,) = read_trace(file_of_two_pipelines)

    assert step.pipelines == ((0, 2), (1, 3))
    for timeline in step.timelines:
        computed = [span.action for spans in timeline.compute_spans for span in spans]
        assert Counter(computed) == Counter(make_schedule("1f1b", 2, MICROBATCHES).compute_actions())


def test_steps_read_from_the_file_follow_each_other(trace_files):
    file, _ = trace_files["1f1b"]

    first, second = read_trace(file)

    assert (first.number, second.number) == (0, 1)
    assert first.timelines[0].start + first.timelines[0].makespan < second.timelines[0].start
    assert first.pipelines == ((0, 1),)


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"traceEvents": [], "otherData": {}})])
def test_read_trace_of_another_file_raises(tmp_path, content):
    (tmp_path / "other.json").write_text(content)

    with pytest.raises(ValueError, match="is not a trace of a pipeline"):
        read_trace(tmp_path / "other.json")
