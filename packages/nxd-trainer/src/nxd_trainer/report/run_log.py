"""The log of a run: events.jsonl, with what is known once per invocation rather than per step.

Its events are the start (environment and data), the memory by kind, the messages by axis, warnings, and the end. Rank 0
writes them; another rank has a file of its own, and only if it warns. The report is made from these and the metrics.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from nxd_state.processes import Process

LOG_FILE = "events.jsonl"
LONGEST_MESSAGE = 2000  # characters of a warning
MOST_WARNINGS = 500  # different ones of a rank; a run may go on for months

Event = Mapping[str, Any]


def log_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's events."""
    return folder / (LOG_FILE if rank == 0 else f"events.{rank}.jsonl")


def remove_log(folder: Path) -> None:
    """Remove the events of a run that starts over."""
    for file in _log_files(folder):
        file.unlink(missing_ok=True)


def read_events(folder: Path) -> list[Event]:
    """Return the events of a run by time, with their rank; lines that are not events are left out."""
    events = []
    for file in _log_files(folder):
        number = file.name.removeprefix("events.").removesuffix("jsonl").rstrip(".")
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str) and _is_time(event.get("time")):
                    events.append({**event, "rank": int(number or 0)})
    return sorted(events, key=lambda event: event["time"])


def last_event(events: Sequence[Event], *kinds: str) -> Event | None:
    """Return the newest event of these kinds; None if there is none."""
    return next((event for event in reversed(events) if event["event"] in kinds), None)


def describe_status(events: Sequence[Event]) -> tuple[str, bool]:
    """Return in words whether a run continues, and whether it is known to be over.

    A killed process writes no end; if it ran on this machine, it is known to be gone.
    """
    last = last_event(events, "start", "end")
    if last is None:
        return "neither its start nor its end is recorded: it has no events.jsonl yet, or no longer", False
    if last["event"] == "start":
        try:
            has_ended = Process.from_json(last.get("process")).has_ended(Process.of(os.getpid()))
        except (TypeError, ValueError, OSError):
            has_ended = False
        return ("killed: its process is gone, and no end is recorded", True) if has_ended else ("running", False)
    words = {
        "finished": "finished at step {step}",
        "stopped": "stopped by a signal at step {step}, which is saved",
        "failed": "failed after step {step}: {error}",
    }
    form = words.get(str(last.get("how")), "ended at step {step}")
    return form.format(step=last.get("step"), error=last.get("error")), True


def has_failed(events: Sequence[Event]) -> bool:
    """Whether a run is known to have ended by a failure, or to have been killed."""
    last = last_event(events, "start", "end")
    return last is not None and describe_status(events)[1] and last.get("how") not in ("finished", "stopped")


def _log_files(folder: Path) -> list[Path]:
    return [file for file in folder.glob("events*.jsonl") if re.fullmatch(r"events(\.\d+)?\.jsonl", file.name)]


def _is_time(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


class RunLog:
    """Writes a rank's events, and records its warnings while it is open. A context manager.

    A log that cannot be written, for example because the disk is full, does not end the run.

    Args:
        folder: the run's folder.
        rank: this process's rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = log_file(folder, rank)
        self._lock = threading.RLock()  # a signal handler may log as well
        self._stream: TextIO | None = None
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seen: dict[tuple[str, str], dict[str, Any]] = {}
        self._recording = recorded_warnings(self.add_warning)

    def write(self, event: str, **content: Any) -> None:
        """Add an event with the current time."""
        with self._lock, suppress(OSError):
            if self._stream is None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._stream = self._file.open("a", encoding="utf-8")
                if self._file.stat().st_size and not _ends_a_line(self._file):
                    self._stream.write("\n")  # a killed process left half a line
            self._stream.write(json.dumps({"event": event, "time": time.time(), **content}, default=str) + "\n")
            self._stream.flush()

    def add_warning(self, level: str, source: str, message: str) -> None:
        """Count a warning. It is written when its count is a power of two, and at the end: the file stays small.

        Warnings that differ in their numbers only are one, which is shown as it was first.
        """
        with self._lock:
            key = (source, re.sub(r"\d+", "0", message))
            if key not in self._seen and len(self._seen) >= MOST_WARNINGS:
                key, level, source, message = ("", ""), "warning", "", "further warnings"
            first = {"level": level, "source": source, "message": message[:LONGEST_MESSAGE]}
            self._counts[key] += 1
            self._seen.setdefault(key, first)
            if self._counts[key].bit_count() == 1:
                self._write_warning(key)

    def _write_warning(self, key: tuple[str, str]) -> None:
        self.write("warning", **self._seen[key], count=self._counts[key])

    def __enter__(self) -> Self:
        self._recording.__enter__()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recording.__exit__(None, None, None)
        with self._lock, suppress(OSError):
            for key, count in self._counts.items():
                if count.bit_count() != 1:
                    self._write_warning(key)
            if self._stream is not None:
                self._stream.close()


def _ends_a_line(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


@contextmanager
def recorded_warnings(add: Callable[[str, str, str], None]) -> Iterator[None]:
    """Pass Python's warnings, and log records of level WARNING or above of any logger, to a function as well.

    Args:
        add: called with the level, the source and the message, as `RunLog.add_warning`.
    """
    make_record, show = logging.getLogRecordFactory(), warnings.showwarning

    def recording_factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if record.levelno >= logging.WARNING:
            with suppress(Exception):  # arguments that do not fit the message are reported by the logger's handler
                if _is_shown(record):
                    add(record.levelname.lower(), record.name, record.getMessage())
        return record

    def recording_show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        add("warning", category.__name__, str(message))
        show(message, category, filename, lineno, file, line)

    logging.setLogRecordFactory(recording_factory)
    warnings.showwarning = recording_show
    try:
        yield
    finally:
        logging.setLogRecordFactory(make_record)
        if warnings.showwarning is recording_show:
            warnings.showwarning = show


def _is_shown(record: logging.LogRecord) -> bool:
    """Whether a handler shows this record on this rank: most loggers drop the lines of all ranks but the first."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    handlers: list[logging.Handler] = []
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    return not handlers or any(record.levelno >= it.level and it.filter(record) for it in handlers)


@dataclass(frozen=True)
class CountedWarning:
    """A warning of a run, over all ranks and invocations."""

    level: str
    source: str  # the logger's name, or the category of a Python warning
    message: str  # as it was first
    count: int
    ranks: Sequence[int]


def count_warnings(events: Sequence[Event]) -> list[CountedWarning]:
    """Return the different warnings among events, in the order of their first time."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    totals: Counter[tuple[str, str]] = Counter()
    counted: Counter[tuple[tuple[str, str], int]] = Counter()  # the last count of a rank
    for event in events:
        if event["event"] != "warning" or not isinstance(event.get("count"), int):
            continue
        level, source, message = (str(event.get(name, "")) for name in ("level", "source", "message"))
        key = (source, re.sub(r"\d+", "0", message))
        entry = found.setdefault(key, {"level": level, "source": source, "message": message, "ranks": set()})
        entry["ranks"].add(event["rank"])
        place, count = (key, event["rank"]), event["count"]
        totals[key] += count - counted[place] if count > counted[place] else count  # each invocation counts from 1
        counted[place] = count
    return [
        CountedWarning(it["level"], it["source"], it["message"], totals[key], sorted(it["ranks"]))
        for key, it in found.items()
    ]
