"""The live view: lines in a pipe, a picture that fits the terminal, and an end of its own."""

import io
import re
import threading

import pytest
from nxd_cli.dispatch import main
from nxd_trainer.report import MetricsLog, RunLog
from nxd_trainer.report.live import sparkline, view
from nxd_trainer.report.metrics import METRICS_FILE, FollowedRecords
from nxd_trainer.report.run_log import read_events
from rich.console import Console


def write_run(folder, records, how="finished"):
    with RunLog(folder, 0) as log, MetricsLog(folder, layout="TP 2 x DP 2") as metrics:
        log.write("start", step=0)
        for record in records:
            metrics.log(record)
        log.write("end", step=len(records), how=how)


def test_watch_in_a_pipe_prints_a_line_per_step_and_ends_with_the_run(tmp_path, record, capsys):
    write_run(tmp_path / "run", [record(step) for step in (1, 2, 3)])

    assert main(["report", str(tmp_path / "run"), "--watch"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 1", "step 2", "step 3", "finished at step 3"]
    assert all("\x1b" not in line for line in lines)


def test_watch_waits_for_a_folder_that_does_not_exist_yet(tmp_path, record, capsys):
    from nxd_trainer.report import live

    folder, stream = tmp_path / "later", io.StringIO()
    console = Console(file=stream, width=80)
    watching = threading.Thread(target=live.watch, args=(folder, console), daemon=True)
    watching.start()
    while "does not exist yet" not in stream.getvalue():
        assert watching.is_alive()
    write_run(folder, [record(1)])
    watching.join(60)

    assert stream.getvalue().splitlines()[-1] == "finished at step 1"


@pytest.mark.parametrize("width", [50, 80, 140])
def test_view_fits_the_terminal_and_shows_the_last_steps(tmp_path, record, width):
    records = [record(step, grad_norm=1.5, held_out_loss=2.0 if step % 5 == 0 else None) for step in range(1, 301)]
    options = {"force_terminal": True, "no_color": True, "legacy_windows": False}
    console = Console(file=io.StringIO(), width=width, height=40, **options)
    with RunLog(tmp_path, 0) as log:
        log.write("start", step=0, last_step=400)
        for _ in range(2):
            log.add_warning("warning", "library", "a long story " * 30)

    console.print(view(tmp_path, records, read_events(tmp_path), console))

    lines = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue()).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines if re.match(r" *(\d+|step(?! loss)) ", line))
    assert ("memory" in lines[-2 - 10]) == (width > 50)
    text = "\n".join(lines)
    assert "300 of 400 steps, ETA 0:50" in text
    assert re.search(r"^ *300 +0\.0333 +2\.0000 +12\.3k +1\.5", text, flags=re.MULTILINE)
    assert "warning, 2 times: a long story" in text
    assert not re.search(r"^ *290 ", text, flags=re.MULTILINE)


def test_view_of_a_low_terminal_keeps_the_last_steps_and_warnings(tmp_path, record):
    console = Console(file=io.StringIO(), width=80, height=16)
    with RunLog(tmp_path, 0) as log:
        log.write("start", step=0, last_step=400)
        log.add_warning("warning", "library", "a story")

    console.print(view(tmp_path, [record(step) for step in range(1, 301)], read_events(tmp_path), console))

    lines = console.file.getvalue().splitlines()
    assert len(lines) == 15  # one is for the cursor
    assert re.match(r" *300 ", lines[-2])
    assert lines[-1] == "warning: a story"


def test_view_before_the_first_step_says_what_it_waits_for(tmp_path):
    console = Console(file=io.StringIO(), width=80)

    console.print(view(tmp_path, [], [], console))

    assert "waiting for the first step of" in console.file.getvalue()


def test_records_are_followed_through_half_lines_and_a_resume(tmp_path, record):
    followed = FollowedRecords(tmp_path)
    before = list(followed.poll())
    with MetricsLog(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.log(record(step))
    file = tmp_path / METRICS_FILE
    whole = file.read_text()
    file.write_text(whole + '{"step": 4, "lo')
    with_half_a_line = [it.step for it in followed.poll()]
    file.write_text(whole)
    with MetricsLog(tmp_path, first_step=2) as metrics:
        metrics.log(record(3, loss=7.0))

    assert before == []
    assert with_half_a_line == [1, 2, 3]
    assert [(it.step, it.loss) for it in followed.poll()] == [(1, 10.0), (2, 5.0), (3, 7.0)]


def test_line_that_is_not_a_record_is_an_error_of_the_user(tmp_path, capsys):
    (tmp_path / METRICS_FILE).write_text("nonsense\n")

    assert main(["report", str(tmp_path), "--watch"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_sparkline_has_the_mean_of_neighbors_and_no_nan():
    assert sparkline([0.0, 0.0, 7.0, 7.0, float("nan"), 3.5, 3.5], 3) == "▁█▅"
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([], 10) == ""
