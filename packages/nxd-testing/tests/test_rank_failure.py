"""Jobs that fail: what the error says, and that the next job works."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from nxd_testing import FailedRank, RankFailure, RankPool, run_on_ranks

pytestmark = pytest.mark.sample(5)  # each takes its time


@pytest.fixture(autouse=True)
def _next_job_works():
    yield
    assert run_on_ranks(dist.get_rank, 2) == [0, 1]


def wait_for_ever():
    while True:
        time.sleep(1000)


def test_rank_failure_one_rank_raises_shows_it_first():
    def fail_on_rank_1():
        if dist.get_rank() == 1:
            raise ValueError("boom on purpose")
        dist.barrier()

    with pytest.raises(RankFailure) as caught:
        run_on_ranks(fail_on_rank_1, 3)

    message = str(caught.value)
    assert message.startswith("rank 1 of 3 failed: ValueError: boom on purpose\n")
    assert "in fail_on_rank_1" in message
    assert 'raise ValueError("boom on purpose")' in message
    assert next(iter(caught.value.failures)) == 1
    assert set(caught.value.failures) == {0, 1, 2}
    assert all(caught.value.failures[rank].is_consequence for rank in (0, 2))


def test_rank_failure_rank_stopped_by_a_peer_is_shown_after_it_even_if_it_reports_sooner():
    stopped = FailedRank(0, "PeerError: this rank stopped because pipeline rank 1 failed with ValueError: no", "", 1)
    failed = FailedRank(1, "ValueError: no", "", 2)

    failure = RankFailure([stopped, failed], 2, {})

    assert list(failure.failures) == [1, 0]
    assert str(failure).startswith("rank 1 of 2 failed: ValueError: no\n")


def test_rank_failure_one_rank_raises_keeps_the_processes():
    def fail_on_rank_0():
        if dist.get_rank() == 0:
            raise ValueError("boom")
        dist.barrier()

    before = run_on_ranks(os.getpid, 3)
    with pytest.raises(RankFailure, match="boom"):
        run_on_ranks(fail_on_rank_0, 3)

    assert run_on_ranks(os.getpid, 3) == before


def test_rank_failure_all_ranks_raise_alike_shows_the_traceback_once():
    def fail():
        raise ValueError("boom")

    with pytest.raises(RankFailure) as caught:
        run_on_ranks(fail, 2)

    assert str(caught.value).count("Traceback (most recent call last)") == 1
    assert set(caught.value.failures) == {0, 1}


def test_rank_failure_failed_assertion_shows_the_line():
    def compare():
        left = dist.get_rank()
        assert left == 7

    with pytest.raises(RankFailure, match="assert left == 7"):
        run_on_ranks(compare, 1)


def test_rank_failure_sys_exit_names_the_rank_and_the_code():
    with pytest.raises(RankFailure, match="rank 0 of 1 failed: SystemExit: 3"):
        run_on_ranks(sys.exit, 1, 3)


def test_rank_failure_peer_in_another_wait_is_stopped_and_comes_second():
    def fail_on_rank_0():
        if dist.get_rank() == 0:
            raise ValueError("boom")
        wait_for_ever()

    with pytest.raises(RankFailure) as caught:
        run_on_ranks(fail_on_rank_0, 2)

    assert list(caught.value.failures) == [0, 1]
    assert "s after another rank had failed" in caught.value.failures[1].summary
    assert "in wait_for_ever" in caught.value.failures[1].traceback


def test_rank_failure_timeout_shows_the_stack_of_every_rank():
    def hang():
        if dist.get_rank() == 0:
            wait_for_ever()
        dist.barrier()

    with pytest.raises(RankFailure, match=r"still running after timeout=\d+\.\d s") as caught:
        run_on_ranks(hang, 2, timeout=2.0)

    assert "in wait_for_ever" in caught.value.failures[0].traceback
    assert "in barrier" in caught.value.failures[1].traceback


def test_rank_failure_process_killed_is_named_before_its_peers():
    def die():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailure) as caught:
        run_on_ranks(die, 3)

    assert str(caught.value).startswith("rank 1 of 3 failed: killed by SIGKILL (exit code -9)\n")
    assert next(iter(caught.value.failures)) == 1


def test_rank_failure_process_that_exits_is_named_with_its_code():
    with pytest.raises(RankFailure, match="rank 0 of 1 failed: exited with code 9"):
        run_on_ranks(os._exit, 1, 9)


def test_rank_failure_segmentation_fault_shows_the_stack():
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankFailure, match="killed by SIGSEGV") as caught:
        run_on_ranks(crash, 1)

    assert "in crash" in caught.value.failures[0].traceback


def test_rank_failure_process_killed_between_jobs_is_replaced_after_one_failure():
    with RankPool() as pool:
        (pid,) = pool.run(os.getpid, 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailure, match="killed by SIGKILL"):
            pool.run(dist.get_rank, 1)

        assert pool.run(dist.get_rank, 1) == [0]


def test_rank_failure_output_of_all_ranks_is_shown():
    def speak_and_fail():
        print(f"hello from {dist.get_rank()}")
        dist.barrier()
        raise ValueError("boom")

    with pytest.raises(RankFailure) as caught:
        run_on_ranks(speak_and_fail, 2)

    assert "----- output of rank 0 -----\n[rank 0] hello from 0" in str(caught.value)
    assert "[rank 1] hello from 1" in str(caught.value)
    assert caught.value.outputs[1] == "hello from 1\n"


def test_rank_failure_very_long_output_keeps_its_end():
    def speak_and_fail():
        for number in range(10_000):
            print(number)
        raise ValueError("boom")

    with pytest.raises(RankFailure) as caught:
        run_on_ranks(speak_and_fail, 1)

    assert "characters left out" in str(caught.value)
    assert "[rank 0] 9999" in str(caught.value)
    assert "[rank 0] 1234\n" not in str(caught.value)


def test_rank_failure_error_whose_class_needs_arguments_is_shown():
    class OddError(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} and {second}")

    def fail():
        raise OddError(1, 2)

    with pytest.raises(RankFailure, match="OddError: 1 and 2"):
        run_on_ranks(fail, 1)
