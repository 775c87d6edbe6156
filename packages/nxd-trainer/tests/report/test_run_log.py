"""The log of a run: warnings of each rank with their count, how the run ended, and lines that are not events."""

import json
import logging
import os
import warnings

import pytest
from nxd_cli import main
from nxd_engine.logs import get_logger
from nxd_state.processes import Process
from nxd_trainer.report.run_log import (
    RunLog,
    count_warnings,
    describe_status,
    has_failed,
    log_file,
    read_events,
    remove_log,
)


def test_warnings_and_log_records_of_all_ranks_are_counted_once_each(tmp_path):
    for rank in (0, 3):
        with warnings.catch_warnings(record=True), RunLog(tmp_path, rank):
            warnings.simplefilter("always")
            for step in range(5):
                warnings.warn(f"odd value in step {step}", stacklevel=1)
            logging.getLogger("some.library").error("lost %s", "a file")
            logging.getLogger("some.library").info("fine")

    odd, lost = count_warnings(read_events(tmp_path))

    assert (odd.source, odd.message, odd.count, odd.ranks) == ("UserWarning", "odd value in step 0", 10, [0, 3])
    assert (lost.level, lost.source, lost.message, lost.count) == ("error", "some.library", "lost a file", 2)


def test_lines_that_a_logger_drops_on_other_ranks_are_not_recorded_there(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with RunLog(tmp_path, rank):
            get_logger("test_run_log").warning("said by rank 0")
            get_logger("test_run_log", rank0_only=False).warning("said by all")

    assert {it.message: it.ranks for it in count_warnings(read_events(tmp_path))} == {
        "said by rank 0": [0],
        "said by all": [0, 1],
    }


def test_endless_warnings_leave_a_small_log_and_the_hooks_are_removed(tmp_path):
    factory, show = logging.getLogRecordFactory(), warnings.showwarning
    with RunLog(tmp_path, 0) as log:
        for number in range(10_000):
            log.add_warning("warning", "library", "again")
            log.add_warning("warning", "library", f"{chr(97 + number % 26) * (number % 999)}")

    assert log_file(tmp_path, 0).stat().st_size < 2_000_000
    assert sum(it.count for it in count_warnings(read_events(tmp_path))) == 20_000
    assert (logging.getLogRecordFactory(), warnings.showwarning) == (factory, show)


def test_counts_of_invocations_add_up(tmp_path):
    for _ in range(2):
        with RunLog(tmp_path, 0) as log:
            for _ in range(3):
                log.add_warning("warning", "library", "again")

    assert [it.count for it in count_warnings(read_events(tmp_path))] == [6]


def test_half_a_line_and_lines_of_others_are_left_out(tmp_path):
    log_file(tmp_path, 0).write_text('{"event": "start", "time": 1}\n[]\n{"time": 2}\n{"event": "end", "ti')
    with RunLog(tmp_path, 0) as log:
        log.write("end", how="finished", step=7)

    assert [event["event"] for event in read_events(tmp_path)] == ["start", "end"]


def test_log_of_a_run_that_starts_over_is_removed_and_other_files_stay(tmp_path):
    for name in ("events.jsonl", "events.12.jsonl", "events.notes.jsonl"):
        (tmp_path / name).write_text("")

    remove_log(tmp_path)

    assert [file.name for file in tmp_path.iterdir()] == ["events.notes.jsonl"]


def test_folder_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "file").write_text("")

    with RunLog(tmp_path / "file", 0) as log:
        log.write("start")
        log.add_warning("warning", "library", "lost")


GONE = [Process.of(os.getpid()).host, os.getpid(), 1]  # another process had this number before


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], ("neither its start nor its end is recorded: it has no events.jsonl yet, or no longer", False)),
        ([{"event": "start", "process": list(Process.of(os.getpid()))}], ("running", False)),
        ([{"event": "start", "process": ["another host", 1, 1]}], ("running", False)),
        ([{"event": "start", "process": GONE}], ("killed: its process is gone, and no end is recorded", True)),
        ([{"event": "start", "process": 7}], ("running", False)),
        ([{"event": "start"}, {"event": "end", "how": "finished", "step": 9}], ("finished at step 9", True)),
        (
            [{"event": "start"}, {"event": "end", "how": "failed", "step": 2, "error": "OSError: full"}],
            ("failed after step 2: OSError: full", True),
        ),
        ([{"event": "end", "how": "finished"}, {"event": "start"}, {"event": "warning"}], ("running", False)),
    ],
)
def test_status_is_that_of_the_last_start_or_end(events, status):
    assert describe_status(events) == status


@pytest.mark.parametrize(
    ("events", "failed"),
    [
        ([], False),
        ([{"event": "start", "process": list(Process.of(os.getpid()))}], False),
        ([{"event": "start", "process": GONE}], True),
        ([{"event": "start"}, {"event": "end", "how": "stopped", "step": 9}], False),
        ([{"event": "start"}, {"event": "end", "how": "failed", "step": 2, "error": "OSError: full"}], True),
    ],
)
def test_watch_of_a_run_that_failed_ends_with_1(tmp_path, events, failed):
    lines = (json.dumps(event | {"time": number}) for number, event in enumerate(events))
    log_file(tmp_path, 0).write_text("\n".join(lines))

    assert has_failed(read_events(tmp_path)) is failed
    if events and describe_status(events)[1]:
        assert main(["report", str(tmp_path), "--watch"]) == int(failed)


def test_events_are_plain_json(tmp_path):
    with RunLog(tmp_path, 0) as log:
        log.write("start", environment={"working folder": tmp_path})

    assert json.loads(log_file(tmp_path, 0).read_text())["environment"] == {"working folder": str(tmp_path)}
