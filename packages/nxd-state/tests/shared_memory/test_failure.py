"""A rank that is killed, stopped, raises or does something else: every rank that waits for it raises, naming it."""

import os
import signal
from datetime import timedelta

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_testing import RankFailure, run_on_ranks

SHARED = {"NXD_SHM": "1"}
WORLD_SIZE = 3
LARGE = 2**19  # elements: several rounds, of which the first can be posted before the peers come


def wait_for(operation, group, numel):
    tensor = torch.ones(numel * group.size)
    following = (group.rank + 1) % group.size
    match operation:
        case "all_reduce":
            nxd_state.all_reduce(tensor, group)
        case "all_gather":
            nxd_state.all_gather(tensor, group)
        case "reduce_scatter":
            nxd_state.reduce_scatter(tensor, group)
        case "all_to_all":
            nxd_state.all_to_all(tensor, group, split_dim=0, concat_dim=0)
        case "broadcast":
            nxd_state.broadcast(tensor, group, source=1)
        case "barrier":
            nxd_state.barrier(group)
        case "all_gather_object":
            nxd_state.all_gather_object("hello", group)
        case "recv":
            nxd_state.recv(tensor, group, source=following)
        case "send":  # more than the slots hold
            nxd_state.send(torch.ones(2**22), group, destination=following)
        case "async":
            nxd_state.all_reduce(tensor, group, async_op=True).wait()


OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "barrier",
    "all_gather_object",
    "recv",
    "send",
    "async",
)
each_operation = pytest.mark.parametrize("operation", OPERATIONS)


def shared_group(timeout=None):
    nxd_state.initialize_model_parallel(dist.get_world_size(), timeout=timeout)
    group = nxd_state.get_group("tp")
    assert group.shared_memory is not None
    nxd_state.all_reduce(torch.ones(3), group)
    return group


@pytest.mark.sample(3)
@each_operation
def test_killed_rank_is_named_by_every_rank_that_waits(operation):
    def job():
        group = shared_group()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(operation, group, LARGE)

    with pytest.raises(RankFailure) as raised:
        run_on_ranks(job, WORLD_SIZE, env=SHARED, timeout=60)

    failures = raised.value.failures
    assert "SIGKILL" in failures[1].summary
    assert next(iter(failures)) == 1
    for rank in (0, 2):
        assert "LostPeerError: rank 1 has left group tp [0, 1, 2]" in failures[rank].summary or (
            "LostPeerError: rank" in failures[rank].summary and "rank 1 is gone" in failures[rank].summary
        )


@pytest.mark.sample(4)
@each_operation
def test_rank_that_raises_frees_those_that_wait(operation):
    def job():
        group = shared_group()
        if group.rank == 1:
            raise ValueError("no more data")
        wait_for(operation, group, 5)

    with pytest.raises(RankFailure, match=r"rank 1 of 3 failed: ValueError: no more data") as raised:
        run_on_ranks(job, WORLD_SIZE, env=SHARED, timeout=60)

    waiting = (0,) if operation == "recv" else () if operation == "send" else (0, 2)
    for rank in waiting:
        assert "rank 1 has left group tp [0, 1, 2]" in raised.value.failures[rank].summary


def test_stopped_rank_is_named_when_the_time_of_the_group_is_over():
    def job():
        group = shared_group(timedelta(seconds=1))
        pids = nxd_state.all_gather(torch.tensor([os.getpid()]), group).tolist()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return "went on"
        try:
            nxd_state.all_reduce(torch.ones(1), group)
        except nxd_state.SharedMemoryError as error:
            return str(error)
        finally:
            os.kill(pids[1], signal.SIGCONT)

    first, _, last = run_on_ranks(job, WORLD_SIZE, env=SHARED, timeout=60)

    for message in (first, last):
        assert "rank 1 of group tp [0, 1, 2] did not reach" in message
        assert "in 1 s: its process" in message


def differs(what, group):
    is_other = group.rank == 1
    match what:
        case "operation":
            call = nxd_state.all_gather if is_other else nxd_state.all_reduce
            return call(torch.ones(4), group)
        case "size":
            return nxd_state.all_reduce(torch.ones(5 if is_other else 4), group)
        case "dtype":
            return nxd_state.all_gather(torch.ones(4, dtype=torch.int32 if is_other else torch.float32), group)
        case "reduction":
            return nxd_state.reduce_scatter(torch.ones(3), group, op="max" if is_other else "sum")
        case "source":
            return nxd_state.broadcast(torch.ones(3), group, source=int(is_other))


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("operation", "all_reduce(op=sum) of 4 x float32", "all_gather of 4 x float32"),
        ("size", "all_reduce(op=sum) of 4 x float32", "all_reduce(op=sum) of 5 x float32"),
        ("dtype", "all_gather of 4 x float32", "all_gather of 4 x int32"),
        ("reduction", "reduce_scatter(op=sum) of 3 x float32", "reduce_scatter(op=max) of 3 x float32"),
        ("source", "broadcast(source=0) of 3 x float32", "broadcast(source=1) of 3 x float32"),
    ],
)
def test_ranks_that_disagree_raise_everywhere_and_say_what_each_does(what, first, second):
    def job():
        group = shared_group()
        with pytest.raises(nxd_state.SharedMemoryError) as raised:
            differs(what, group)
        with pytest.raises(nxd_state.SharedMemoryError, match="can no longer be used"):
            nxd_state.barrier(group)
        return str(raised.value)

    for message in run_on_ranks(job, WORLD_SIZE, env=SHARED, timeout=60):
        assert f"rank 0: {first}" in message
        assert f"rank 1: {second}" in message


def test_message_of_another_size_than_received_raises_and_names_both():
    def job():
        group = shared_group()
        if group.rank == 0:
            nxd_state.send(torch.ones(4), group, destination=1)
        if group.rank != 1:
            return None
        with pytest.raises(nxd_state.SharedMemoryError) as raised:
            nxd_state.recv(torch.empty(3), group, source=0)
        return str(raised.value)

    message = run_on_ranks(job, WORLD_SIZE, env=SHARED, timeout=60)[1]

    assert "rank 0 sent send to recv of 4 x float32, rank 1 receives send to recv of 3 x float32" in message


def test_dtype_that_cannot_be_added_raises_and_leaves_the_group_usable():
    def job():
        group = shared_group()
        with pytest.raises(RuntimeError, match=r"op='max' is not defined for torch\.complex64"):
            nxd_state.all_reduce(torch.ones(2, dtype=torch.complex64), group, op="max")
        return nxd_state.all_reduce(torch.ones(1), group).item()

    assert run_on_ranks(job, 2, env=SHARED, timeout=60) == [2.0, 2.0]
