"""Traced steps as a file that Perfetto and Chrome's `about:tracing` show, and back.

The format is Chrome's Trace Event Format, times in microseconds. A process (`pid`) is a rank; its threads (`tid`) are
a lane per stage, where stages compute, a lane of waits for messages, and a lane of messages handed over, from which
arrows lead to the waits that they end.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nxd_pipeline.schedules import RECEIVES, SENDS, Action, ActionKind, Span, Timeline, parse_action
from nxd_pipeline.timeline.traced_step import TracedStep

NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
    ActionKind.SEND_ACTIVATION: "send activation",
    ActionKind.RECV_ACTIVATION: "wait for activation",
    ActionKind.SEND_GRADIENT: "send gradient",
    ActionKind.RECV_GRADIENT: "wait for gradient",
}
# The format has no free colors, only names that a viewer knows; Perfetto colors by the event's name instead.
COLOR_NAMES = {
    ActionKind.FORWARD: "rail_response",
    ActionKind.BACKWARD: "thread_state_running",
    ActionKind.BACKWARD_INPUT: "good",
    ActionKind.BACKWARD_WEIGHT: "thread_state_iowait",
    ActionKind.SEND_ACTIVATION: "generic_work",
    ActionKind.SEND_GRADIENT: "generic_work",
    ActionKind.RECV_ACTIVATION: "terrible",
    ActionKind.RECV_GRADIENT: "terrible",
}
Event = dict[str, Any]


def lane_names(step: TracedStep) -> Iterator[Event]:
    """The metadata events that name ranks and lanes; once per file."""
    for index, (ranks, timeline) in enumerate(zip(step.pipelines, step.timelines, strict=True)):
        waits = _num_stages(timeline)
        for pipeline_rank, (rank, spans) in enumerate(zip(ranks, timeline.spans, strict=True)):
            place = f"rank {rank}: pipeline {index}, pipeline rank {pipeline_rank}"
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": place}}
            yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
            stages = sorted({span.action.stage for span in spans})
            lanes = {**{stage: f"stage {stage}" for stage in stages}, waits: "waits", waits + 1: "sends"}
            for lane, name in lanes.items():
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane}}


def step_events(step: TracedStep) -> Iterator[Event]:
    """An event for each action of each rank, and an arrow for each message."""
    for index, (ranks, timeline) in enumerate(zip(step.pipelines, step.timelines, strict=True)):
        num_stages = _num_stages(timeline)
        for rank, spans in zip(ranks, timeline.spans, strict=True):
            for span in spans:
                place = {"pid": rank, "tid": _lane(span.action, num_stages)}
                yield _slice(span, step.number) | place
                if span.action.is_communication:
                    yield _arrow_end(span, f"{step.number}/{index}") | place


def trace_facts(step: TracedStep, clock_errors: Sequence[float]) -> dict[str, Any]:
    """The content of the file's `otherData`: facts of all steps, and the clock errors in seconds, step by step."""
    return {
        "schedule": step.timelines[0].name,
        "pipelines": [list(ranks) for ranks in step.pipelines],
        "clock_errors_in_microseconds": [_microseconds(error) for error in clock_errors],
    }


def read_trace(file: str | Path) -> tuple[TracedStep, ...]:
    """The steps in a file that `trace_file_path` names.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        other = content["otherData"]
        pipelines = tuple(tuple(map(int, ranks)) for ranks in other["pipelines"])
        spans: dict[int, dict[int, list[Span]]] = {}  # by step and rank
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                of_step = spans.setdefault(event["args"]["step"], {rank: [] for ranks in pipelines for rank in ranks})
                of_step[event["pid"]].append(_span(event))
        errors = other["clock_errors_in_microseconds"]
        return tuple(
            TracedStep(
                number,
                pipelines,
                tuple(Timeline(other["schedule"], tuple(tuple(of_step[it]) for it in ranks)) for ranks in pipelines),
                clock_error=errors[number] * 1e-6,
            )
            for number, of_step in sorted(spans.items())
        )
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file} is not a trace of a pipeline ({type(error).__name__}: {error}); "
            "pass a file that NxDPPModel wrote to trace_file_path"
        ) from error


def _span(event: Event) -> Span:
    start = event["ts"] * 1e-6
    return Span(parse_action(event["args"]["action"]), start, start + event["dur"] * 1e-6)


def _slice(span: Span, step: int) -> Event:
    action = span.action
    return {
        "ph": "X",
        "name": f"{NAMES[action.kind]} {action.microbatch}",
        "cat": "message" if action.is_communication else "compute",
        "cname": COLOR_NAMES[action.kind],
        "ts": _microseconds(span.start),
        "dur": _microseconds(span.end - span.start),
        "args": {"action": str(action), "stage": action.stage, "microbatch": action.microbatch, "step": step},
    }


def _arrow_end(span: Span, prefix: str) -> Event:
    """One end of a message's arrow, within the event that it belongs to; both ends have the same `id`."""
    action = span.action
    if action.kind in SENDS:
        end = {"ph": "s", "ts": _microseconds(span.start), "id": f"{prefix}/{action}"}
    else:
        arrival = max(span.start, span.end - 1e-9)  # a moment before the event's end, which is no more part of it
        end = {"ph": "f", "bp": "e", "ts": _microseconds(arrival), "id": f"{prefix}/{action.counterpart()}"}
    return end | {"name": "message", "cat": "message"}


def _lane(action: Action, num_stages: int) -> int:
    if action.kind in RECEIVES:
        return num_stages
    return num_stages + 1 if action.kind in SENDS else action.stage


def _num_stages(timeline: Timeline) -> int:
    return 1 + max(span.action.stage for spans in timeline.spans for span in spans)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
