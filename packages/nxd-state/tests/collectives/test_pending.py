"""`Pending`, the handle of what is under way: waits for all its works, finishes once, can be waited for again."""

import nxd_state
import pytest
import torch
from nxd_state import Pending
from nxd_testing import run_on_ranks


class Work:
    """Notes when it is waited for; raises the first `failures` times."""

    def __init__(self, name, events, failures=0):
        self.name, self.events, self.failures = name, events, failures

    def wait(self):
        self.events.append(self.name)
        if self.failures:
            self.failures -= 1
            raise RuntimeError(f"{self.name} failed")


def test_wait_twice_waits_for_each_work_and_finishes_once():
    events = []
    pending = Pending(
        2, Work("a", events), Work("b", events), finish=lambda number: events.append("finish") or 3 * number
    )

    assert [pending.wait(), pending.wait()] == [6, 6]
    assert events == ["a", "b", "finish"]


def test_without_works_gives_its_result_at_once():
    assert Pending("there").wait() == "there"


def test_wait_after_a_work_that_raised_waits_for_it_again_and_then_finishes():
    events = []
    pending = Pending(1, Work("a", events, failures=1), finish=lambda number: number + 1)

    with pytest.raises(RuntimeError, match="a failed"):
        pending.wait()

    assert pending.wait() == 2
    assert events == ["a", "a"]


def test_then_finishes_the_result_of_the_handle_that_it_was_made_of():
    events = []
    pending = Pending(2, Work("a", events), finish=lambda number: 3 * number)
    widened = pending.then(lambda number: number + 1)

    assert events == []
    assert [widened.wait(), widened.wait(), pending.wait()] == [7, 7, 6]
    assert events == ["a"]


def test_handles_of_every_operation_can_be_waited_for_twice_and_finished():
    def check():
        nxd_state.initialize_model_parallel(2)
        group = nxd_state.get_group("tp")
        peer = 1 - group.rank
        mine = torch.tensor([1.0, 2.0]) * (group.rank + 1)
        expected = {
            "all_reduce": [3.0, 6.0],
            "all_reduce_": [3.0, 6.0],
            "all_gather": [1.0, 2.0, 2.0, 4.0],
            "all_gather_": [1.0, 4.0],
            "reduce_scatter": [[3.0], [6.0]][group.rank],
        }
        for name, result in expected.items():
            pending = getattr(nxd_state, name)(mine.clone(), group, async_op=True)
            assert isinstance(pending, Pending)
            assert [pending.wait().tolist(), pending.wait().tolist()] == [result] * 2, name
            assert pending.then(lambda tensor: -tensor).wait().tolist() == [-value for value in result], name
        sent, received = nxd_state.isend(mine, group, destination=peer), torch.zeros(2)
        arriving = nxd_state.irecv(received, group, source=peer)
        assert [arriving.wait().tolist(), arriving.wait().tolist()] == [[peer + 1.0, 2 * peer + 2.0]] * 2
        assert sent.wait() is mine

    for switch in ("0", "1"):
        run_on_ranks(check, 2, env={"NXD_SHM": switch})
