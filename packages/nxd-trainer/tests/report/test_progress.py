import io
import re

import pytest
from nxd_trainer.report import ProgressDisplay, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: `clock["now"] = 5.0`."""
    time = {"now": 100.0}
    monkeypatch.setattr(progress, "perf_counter", lambda: time["now"])
    return time


def test_plain_line_shows_every_measure(record, clock):
    stream = io.StringIO()
    with ProgressDisplay(400, stream=stream) as shown:
        clock["now"] += 20
        shown.log(record(40, loss=3.21, throughput=48.2, grad_norm=1.018, held_out_loss=3.3))

    assert stream.getvalue() == (
        "step  40/400 | ETA 3:00 | step_loss 3.2100  held-out 3.3000  12.3k tok/s  throughput 48.2 seq/s  "
        "grad-norm 1.02  lr 1.0e-03  1.5 GiB\n"
    )


def test_plain_line_leaves_out_what_was_not_measured(record):
    stream = io.StringIO()
    with ProgressDisplay(9, stream=stream) as shown:
        shown.log(record(1, held_out_loss=3.3))
        shown.log(record(2))

    assert "held-out 3.3000" in stream.getvalue().splitlines()[0]
    assert "held-out" not in stream.getvalue().splitlines()[1]
    assert "grad" not in stream.getvalue()


def test_plain_time_left_after_a_resume_counts_the_steps_of_this_invocation(record, clock):
    stream = io.StringIO()
    with ProgressDisplay(400, first_step=300, stream=stream) as shown:
        clock["now"] += 10
        shown.log(record(320))

    assert "step 320/400 | ETA 0:40 |" in stream.getvalue()


@pytest.mark.parametrize("terminal", [io.StringIO, Terminal])
def test_ranks_that_do_not_write_show_nothing(record, terminal):
    stream = terminal()
    with ProgressDisplay(9, is_writer=False, stream=stream) as shown:
        shown.advance(1)
        shown.log(record(1))
        shown.message("hello")

    assert stream.getvalue() == ""


def test_terminal_shows_a_bar_that_moves_and_stays(record):
    stream = Terminal()
    with ProgressDisplay(8, first_step=4, stream=stream) as shown:
        shown.log(record(5, held_out_loss=3.3))
        shown.log(record(6, loss=2.5))
        shown.advance(8)

    last = re.split(r"[\r\n]", stream.getvalue().rstrip())[-1]
    assert last.startswith("8/8 ")
    assert "| step_loss 2.5000  held-out 3.3000  12.3k tok/s" in last  # the newest held-out loss stays in view


def test_terminal_message_stands_on_its_own_line():
    stream = Terminal()
    with ProgressDisplay(8, stream=stream) as shown:
        shown.message("saved")

    assert "saved" in re.split(r"[\r\n]", stream.getvalue())


def test_plain_message_is_a_line():
    stream = io.StringIO()
    with ProgressDisplay(8, stream=stream) as shown:
        shown.message("saved")

    assert stream.getvalue() == "saved\n"


def test_bar_is_closed_when_the_run_raises():
    stream = Terminal()

    def fail_within_progress():
        with ProgressDisplay(8, stream=stream) as shown:
            shown.advance(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within_progress()

    assert stream.getvalue().endswith("\n")
