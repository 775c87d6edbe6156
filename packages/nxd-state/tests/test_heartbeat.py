"""What a rank tells the others every second, and what it answers once they ask."""

import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable

import nxd_state
import pytest
import torch
from nxd_state.heartbeat import ask_ranks, last_heartbeat, start_heartbeat, stop_heartbeat
from nxd_state.process_groups import job_store
from nxd_testing import deadline, run_torchrun

TIME = r"at \d\d:\d\d:\d\d UTC"


def wait_until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + deadline(20)
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def have_told(count: int, steps: tuple[int, ...] = ()) -> None:
    """Wait until all of so many ranks have."""
    for rank in range(count):
        step = f"in step {steps[rank]}" if steps else ""
        wait_until(lambda rank=rank, step=step: step in (last_heartbeat(rank, job_store()) or "nothing"))


class WaitsForRelease(torch.nn.Module):
    def forward(self) -> None:
        wait_until(lambda: job_store().check(["released"]))


def test_rank_that_is_asked_tells_its_module_and_line_and_before_only_its_step(run_ranks):
    def wait_or_ask() -> tuple[str | None, dict[int, str]]:
        nxd_state.initialize_model_parallel(2)
        nxd_state.report_step(7)
        if nxd_state.get_group("tp").rank == 1:
            WaitsForRelease()()
            return None, {}
        have_told(2, (7, 7))
        told = last_heartbeat(1, job_store()), ask_ranks([1], job_store(), deadline(20))
        job_store().set("released", "")
        return told

    (told, answers), _ = run_ranks(wait_or_ask, 2)

    assert re.fullmatch(rf"{TIME} \[in step 7\]", told), told
    line = r"\S+test_heartbeat\.py:\d+ in \S+"
    assert re.fullmatch(rf"{TIME} \[in step 7; forward of WaitsForRelease; {line}\]", answers[1]), answers


def test_rank_has_sent_a_heartbeat_once_it_is_initialized(run_ranks):
    def last() -> str | None:
        nxd_state.initialize_model_parallel(2)
        return last_heartbeat(nxd_state.get_group("tp").rank, job_store())

    assert all(re.fullmatch(TIME, told or "it never sent one") for told in run_ranks(last, 2))


def test_heartbeat_does_not_look_at_the_main_thread_until_it_is_asked(run_ranks):
    def count() -> tuple[int, int, int]:
        looks = []
        look = sys._current_frames
        sys._current_frames = lambda: looks.append(1) or look()
        try:
            nxd_state.initialize_model_parallel(2)
            for step in (1, 2, 3):
                nxd_state.report_step(step)
                have_told(2, (step, step))
            unasked = len(looks)
            nxd_state.barrier(nxd_state.get_world_group())
            if nxd_state.get_group("tp").rank == 0:
                ask_ranks([1], job_store(), deadline(20))
            nxd_state.barrier(nxd_state.get_world_group())
            nxd_state.report_step(4)
            have_told(2, (4, 4))
            nxd_state.report_step(5)
            have_told(2, (5, 5))
            return unasked, len(looks)
        finally:
            sys._current_frames = look

    assert run_ranks(count, 2) == [(0, 0), (0, 1)]


def test_ranks_that_all_ask_each_other_are_all_answered(run_ranks):
    def ask() -> dict[int, str]:
        nxd_state.initialize_model_parallel()
        rank = nxd_state.get_world_group().rank
        nxd_state.report_step(10 + rank)
        have_told(3, (10, 11, 12))
        ask_ranks(range(3), job_store(), 0)  # and does not stay for the answer, as one that dies meanwhile
        answers = ask_ranks({0, 1, 2} - {rank}, job_store(), deadline(20))
        nxd_state.barrier(nxd_state.get_world_group())
        return answers

    for rank, answers in enumerate(run_ranks(ask, 3)):
        assert sorted(answers) == sorted({0, 1, 2} - {rank})
        assert all(f"[in step {10 + other}; " in answer for other, answer in answers.items())


def test_question_to_an_earlier_process_of_a_rank_is_not_answered(run_ranks):
    def ask() -> bool:
        nxd_state.initialize_model_parallel()
        stop_heartbeat()
        ask_ranks([0], job_store(), 0)
        start_heartbeat(0, job_store())
        nxd_state.report_step(1)
        have_told(1, (1,))
        nxd_state.report_step(2)
        have_told(1, (2,))
        return job_store().check(["nxd_state/answer_of_rank_0"])

    assert run_ranks(ask, 1) == [False]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process")
@pytest.mark.slow
def test_rank_that_is_stopped_is_named_with_the_step_of_its_last_heartbeat(run_ranks):
    def stop_or_report() -> str:
        nxd_state.initialize_model_parallel(2)
        group = nxd_state.get_group("tp")
        nxd_state.report_step(7)
        have_told(2, (7, 7))
        processes = nxd_state.collectives.all_gather_object(os.getpid(), group)
        shown = io.StringIO()
        if group.rank == 0:
            os.kill(processes[1], signal.SIGSTOP)
            try:
                job_store().set(nxd_state.FAILURE_SHOWN, "")
                with contextlib.redirect_stderr(shown):
                    nxd_state.report_failure(nxd_state.PeerError("no answer within 2 seconds from rank 1 of 2"))
            finally:
                os.kill(processes[1], signal.SIGCONT)
        nxd_state.barrier(group)
        return shown.getvalue()

    shown, _ = run_ranks(stop_or_report, 2)

    last = rf"the last was {TIME} \[in step 7\]"
    assert re.search(rf"\nno heartbeat from rank 1: .*; {last}; NXD_TIMEOUT sets", shown), shown


HANGS = """
import time
import torch
from nxd_state import all_reduce, get_world_group, initialize_model_parallel, report_step

class Hangs(torch.nn.Module):
    def forward(self, x):
        if get_world_group().rank == 1:
            time.sleep(1000)
        return all_reduce(x, get_world_group())

initialize_model_parallel()
report_step(3)
Hangs()(torch.ones(2))
"""


def test_rank_that_hangs_is_named_once_with_what_it_does(tmp_path):
    (tmp_path / "script.py").write_text(HANGS)

    result = run_torchrun([str(tmp_path / "script.py")], 3, env={"NXD_TIMEOUT": str(deadline(5))}, timeout=240)

    assert result.returncode != 0
    shown = [line for line in result.stderr.splitlines() if line.startswith(("rank ", "no heartbeat"))]
    assert shown[0].startswith(("rank 0 ended: ", "rank 2 ended: ")), result.stderr
    does = rf"{TIME} \[in step 3; forward of Hangs; {re.escape(str(tmp_path))}/script\.py:9 in forward\]"
    named = [line for line in shown if line.startswith(("rank 1 ", "no heartbeat"))]
    assert len(named) == 1, result.stderr
    text = rf"rank 1 is alive but did not join in time: {does}; NXD_TIMEOUT sets the time to wait"
    assert re.fullmatch(text, named[0]), named
