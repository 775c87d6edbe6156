"""One logged step of a run, and its line in metrics.jsonl. Everything that reports a run reads these."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The state of a run after one optimizer step."""

    step: int  # optimizer steps taken, from 1
    loss: float  # mean training loss of the step, over all ranks
    learning_rate: float
    tokens: int  # trained on since the run began
    tokens_per_second: float  # over all ranks, since the record before
    seconds: float  # since this invocation began
    peak_memory_bytes: int  # of the writer's process or device
    throughput: float | None = None  # sequences per second, as scripts for NeuronX Distributed count
    grad_norm: float | None = None  # before clipping; None without clipping
    held_out_loss: float | None = None  # None where the step ended without evaluation
    layout: str | None = None  # "TP 2 x DP 2": in the first record of each invocation
    resumed_from: int | None = None  # step of the checkpoint: in the first record after a resume


def record_to_line(record: StepRecord) -> str:
    """The record as a line of strict JSON: unset fields are left out, a number that is not finite is null."""
    content: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if value is not None:
            content[field.name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(content) + "\n"


def line_to_record(line: str) -> StepRecord:
    """The record of a line; null was a number that is not finite. Keys it does not know are left out.

    Raises:
        ValueError: not a record, such as the line that a killed process did not finish.
    """
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError(f"{line!r} is not a record")
    known = {field.name for field in fields(StepRecord)}
    values: dict[str, Any] = {
        name: math.nan if value is None else value for name, value in content.items() if name in known
    }
    try:
        return StepRecord(**values)
    except TypeError as error:
        raise ValueError(f"{line!r} is not a record: {error}") from error


def read_records(file: str | Path) -> list[StepRecord]:
    """The records of a metrics.jsonl in their order; a last line that was not finished is left out.

    Raises:
        ValueError: any other line is not a record.
    """
    file = Path(file)
    text = file.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    records = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            records.append(line_to_record(line))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
    return records
