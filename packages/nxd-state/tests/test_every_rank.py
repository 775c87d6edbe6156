"""Work on every rank: what fails on one is an error on all."""

import pytest
from nxd_state import Group, attempt_on_every_rank, get_world_group, initialize_model_parallel, on_every_rank


def test_on_every_rank_returns_each_ranks_own_result(run_ranks):
    def job():
        initialize_model_parallel()
        world = get_world_group()
        return on_every_rank("counting", lambda: world.rank + 1, world)

    assert run_ranks(job, 2) == [1, 2]


def test_failure_on_one_rank_raises_one_text_on_every_rank(run_ranks):
    def job():
        initialize_model_parallel()
        world = get_world_group()
        with pytest.raises(RuntimeError) as raised:
            on_every_rank("dividing", lambda: 1 / (1 - world.rank), world)
        return str(raised.value), type(raised.value.__cause__)

    text = "dividing failed on 1 of 2 ranks\n  rank 1: ZeroDivisionError: division by zero"
    assert run_ranks(job, 2) == [(text, type(None)), (text, ZeroDivisionError)]


def test_attempt_on_every_rank_tells_failures_and_raises_none():
    def fail():
        raise OSError("full")

    attempt = attempt_on_every_rank(fail, Group.solo("dp"))

    assert (attempt.results, str(attempt.error), attempt.failures) == ((), "full", {0: "OSError: full"})
