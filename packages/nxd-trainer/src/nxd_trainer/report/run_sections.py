"""The parts of a run's report that come from its log: status, data, memory, messages, warnings, environment."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import compress
from typing import Any

from nxd_cli.output import show_count, show_memory

from nxd_trainer.report.charts import COLORS, legend_of
from nxd_trainer.report.metrics import StepRecord
from nxd_trainer.report.run_log import Event, count_warnings, last_event

AXES = {
    "tp": "tensor parallel",
    "pp": "pipeline",
    "dp": "data parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "etp": "expert tensor parallel",
}
WORLD = "pp+dp+cp+tp"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts, which are escaped; an empty head and columns without texts are left out."""
    rows = list(rows)
    filled = [any(column) for column in zip(*rows, strict=True)]
    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in compress(head, filled))}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(map(_cell, compress(row, filled)))}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'


def _cell(text: str) -> str:
    is_number = re.fullmatch(r"[\d.,]+%?( \w{1,3})?", text)
    return f"<td{' class=number' if is_number else ''}>{escape(text)}</td>"


def show_bytes(num_bytes: float) -> str:
    """Format bytes, from bytes to GiB."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes < 2**20 else show_memory(num_bytes)


def data_section(events: Sequence[Event], records: Sequence[StepRecord]) -> str:
    """Return the data: sources, the samples of an epoch, what of the tokens was masked or padding, and the notes."""
    start = last_event(events, "start")
    data = start.get("data") if start else None
    if not isinstance(data, dict):
        return ""
    rows = [(f"{it.get('kind', '')} of {it.get('name', '')}", _amount(it)) for it in data.get("sources", [])]
    length, batch = data.get("sequence_length"), data.get("global_batch_size")
    if data.get("samples"):
        rows.append(("an epoch", f"{data['samples']:,} samples of {length:,} tokens"))
        of = "" if data["counted_samples"] == data["samples"] else f", counted on {data['counted_samples']:,} samples"
        rows.append(("padding", f"{data['padding']:.1%} of the positions{of}"))
        rows.append(("masked", f"{data['masked']:.1%} of the tokens, which the loss does not count{of}"))
    if "truncated" in data:
        of_all = sum(it["tokens"] for it in data["sources"])
        share = data["truncated"] / max(1, of_all)
        rows.append(("cut off", f"{data['truncated']:,} tokens beyond data.sequence_length ({share:.1%})"))
    if data.get("packed"):
        rows.append(("packed", str(data["packed"])))
    rows.append(("held out", f"{data.get('held_out_samples', 0):,} samples"))
    if records:
        rows += _data_so_far(records[-1], data, int(batch or 0))
    notes = "".join(f"<li>{escape(str(note))}</li>" for note in data.get("notes", []))
    return table((), rows) + (f"<ul>{notes}</ul>" if notes else "")


def _amount(source: Mapping[str, Any]) -> str:
    if "tokens" not in source:
        return "streamed"
    return f"{source['documents']:,}, {show_count(source['tokens'])} tokens"


def _data_so_far(last: StepRecord, data: Mapping[str, Any], batch: int) -> list[tuple[str, str]]:
    samples = last.step * batch
    epochs = f", {samples / data['samples']:.2f} epochs" if data.get("samples") else ""
    seen = last.tokens if last.tokens_seen is None else last.tokens_seen
    return [
        ("read so far", f"{samples:,} samples, {show_count(seen)} tokens{epochs}"),
        ("counted by the loss so far", f"{show_count(last.tokens)} tokens ({last.tokens / max(1, seen):.1%})"),
    ]


def memory_section(events: Sequence[Event]) -> str:
    """Return the memory by kind of the fullest rank as a bar, and of all ranks as a table."""
    memory = last_event(events, "memory")
    if memory is None:
        return ""
    kinds, of_process = dict(memory["bytes"]), bool(memory.get("peak_is_of_process"))
    peak = kinds.pop("peak")
    tensors = sum(kinds.values())
    if not of_process and peak > tensors:
        kinds["activations and temporaries"] = peak - tensors
    total = max(1, sum(kinds.values()))
    colors = dict(zip(kinds, COLORS * 2, strict=False))
    bar = "".join(
        f'<span style="width:{num_bytes / total:.2%};background:{colors[kind]}" '
        f'title="{escape(f"{kind}: {show_bytes(num_bytes)}")}"></span>'
        for kind, num_bytes in kinds.items()
    )
    legend = legend_of({f"{kind} {show_bytes(num_bytes)}": colors[kind] for kind, num_bytes in kinds.items()})
    what = "the resident set of the process, with Python and libraries" if of_process else "tensors on the device"
    rows = [
        (kind if kind != "peak" else "peak so far", show_bytes(memory["least"].get(kind, 0)), show_bytes(most))
        for kind, most in memory["most"].items()
    ]
    return (
        f"<p>Rank {escape(str(memory['fullest_rank']))}, the one with the highest peak, after step "
        f"{escape(str(memory['step']))}. The peak is {what}.</p>"
        f'<div class="bar">{bar}</div><p>{legend}</p>'
        f"{table(('over all ranks', 'least', 'most'), rows)}"
    )


def messages_section(events: Sequence[Event]) -> str:
    """Return what a rank sends in a step, by axis."""
    messages = last_event(events, "messages")
    if messages is None:
        return ""
    axes = sorted(messages["axes"].items(), key=lambda item: -item[1]["bytes"])
    if not axes:
        return f"<p>Step {escape(str(messages['step']))} needed no messages.</p>"
    rows = [(_axis(axis), f"{it['calls']:,}", show_bytes(it["bytes"])) for axis, it in axes]
    return (
        f"<p>Counted in step {escape(str(messages['step']))} on the rank that sends most along each axis, as a ring "
        "sends it. Collectives of compiled code are not counted.</p>"
        f"{table(('axis', 'collectives and messages', 'bytes sent'), rows)}"
    )


def _axis(axis: str) -> str:
    if axis == WORLD:
        return "all ranks"
    return " x ".join(AXES.get(part, part) for part in axis.split("+")) + f" ({axis})"


def warnings_section(events: Sequence[Event]) -> str:
    """Return the different warnings, with their count and ranks."""
    rows = [
        (it.level, f"{it.count:,}", _ranks(it.ranks), f"{it.source}: {it.message}" if it.source else it.message)
        for it in count_warnings(events)
    ]
    if rows:
        return table(("level", "times", "ranks", "first message"), rows)
    return "<p>None.</p>" if last_event(events, "start") else ""


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def environment_section(events: Sequence[Event]) -> str:
    """Return the environment of the last start."""
    start = last_event(events, "start")
    environment = start.get("environment") if start else None
    if not isinstance(environment, dict):
        return ""
    own = {name: value for name, value in environment.items() if name.startswith("nxd-")}
    rows = [(name, str(value)) for name, value in environment.items() if name not in own]
    versions = dict.fromkeys(own.values())
    merged = [f"{version}: {', '.join(name for name in own if own[name] == version)}" for version in versions]
    return table((), [*rows, *(("nxd packages", text) for text in merged)])


def starts_section(events: Sequence[Event], records: Sequence[StepRecord]) -> str:
    """Return each start and end of the run; of a run without a log, the starts that its metrics show."""
    rows = []
    for event in events:
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(event["time"]))
        if event["event"] == "start":
            environment = event.get("environment", {})
            what = f"started from step {event.get('step')}"
            rows.append((at, what, f"{environment.get('layout', '')}, {environment.get('host', '')}"))
        elif event["event"] == "end":
            rows.append((at, f"{event.get('how')} at step {event.get('step')}", str(event.get("error", ""))))
    if rows:
        return table(("time", "event", ""), rows)
    starts = [it for it in records if it.layout is not None]
    return table(("started from step", "layout"), [(f"{it.resumed_from or 0}", str(it.layout)) for it in starts])
