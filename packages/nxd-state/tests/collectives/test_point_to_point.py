"""Messages without waiting carry what was sent, in order, also where the ranks of a pair send to each other."""

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import CollectiveMismatch, Receive, Send
from nxd_testing import run_on_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
DEBUG = {"NXD_DEBUG_COLLECTIVES": "1"}

with_and_without_debug = pytest.mark.parametrize("env", [{}, DEBUG], ids=["plain", "debug"])


def group_of_all():
    nxd_state.initialize_model_parallel(dist.get_world_size())
    return nxd_state.get_group("tp")


def tensor_of(rank, dtype):
    return (torch.arange(12).reshape(3, 4) % 5 + rank).to(dtype)


def same_bytes(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@with_and_without_debug
def test_batch_of_every_dtype_and_layout_carries_the_tensors_both_ways_round_the_ring(env):
    def exchange():
        group = group_of_all()
        before, behind = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        buffers = [(peer, torch.empty(4, 3, dtype=dtype)) for peer in (before, behind) for dtype in DTYPES]
        sends = [Send(tensor_of(group.rank, dtype).t(), peer) for peer in (behind, before) for dtype in DTYPES]
        pending = nxd_state.batch_isend_irecv([*sends, *(Receive(buffer, peer) for peer, buffer in buffers)], group)
        for message in pending:
            message.wait()
        return all(same_bytes(buffer, tensor_of(peer, buffer.dtype).t()) for peer, buffer in buffers)

    assert run_on_ranks(exchange, 3, env=env) == [True] * 3


@with_and_without_debug
def test_messages_waited_for_in_any_order_arrive_in_the_order_in_which_they_were_sent(env):
    def exchange():
        group = group_of_all()
        peer = 1 - group.rank
        sends = [nxd_state.isend(torch.tensor([10 * group.rank + i]), group, destination=peer) for i in range(5)]
        receives = [nxd_state.irecv(torch.empty(1, dtype=torch.int64), group, source=peer) for _ in range(5)]
        values = [receive.wait().item() for receive in reversed(receives)]
        for send in sends:
            send.wait()
        values.append(nxd_state.all_reduce(torch.tensor(group.rank), group).item())
        if group.rank == 0:  # blocking at one end only
            nxd_state.send(torch.ones(2), group, destination=1)
        else:
            values.append(nxd_state.irecv(torch.empty(2), group, source=0).wait().sum().item())
        return values

    assert run_on_ranks(exchange, 2, env=env) == [[14, 13, 12, 11, 10, 1], [4, 3, 2, 1, 0, 1, 2.0]]


def test_wait_called_twice_gives_the_same_tensor():
    def exchange():
        group = group_of_all()
        if group.rank == 0:
            nxd_state.isend(torch.ones(2), group, destination=1).wait()
            return True
        pending = nxd_state.irecv(torch.zeros(2), group, source=0)
        return torch.equal(pending.wait(), torch.ones(2)) and pending.wait() is pending.wait()

    assert run_on_ranks(exchange, 2) == [True, True]


def test_empty_batch_sends_nothing():
    assert nxd_state.batch_isend_irecv([], nxd_state.Group.solo("pp")) == []


def test_message_of_another_dtype_than_received_raises_on_both_ranks_in_debug_mode():
    def exchange():
        group = group_of_all()
        if group.rank == 0:
            pending = nxd_state.isend(torch.ones(4), group, destination=1)
        else:
            pending = nxd_state.irecv(torch.empty(8, dtype=torch.bfloat16), group, source=0)
        with pytest.raises(CollectiveMismatch) as raised:
            pending.wait()
        return str(raised.value)

    for message in run_on_ranks(exchange, 2, env=DEBUG, timeout=20):
        assert "rank 0: send to recv((4,), torch.float32) in group tp [0, 1]" in message
        assert "rank 1: send to recv((8,), torch.bfloat16) in group tp [0, 1]" in message
        assert message.count("test_point_to_point.py:") >= 2


def test_aborted_group_frees_ranks_that_wait_and_names_the_first_reason():
    def abort():
        nxd_state.initialize_model_parallel(dist.get_world_size())
        group = nxd_state.get_group("tp")
        if group.rank == 2:
            return nxd_state.abort_group(group, "out of memory"), True
        with pytest.raises(RuntimeError):
            nxd_state.recv(torch.empty(1), group, source=group.rank + 1)
        reason = nxd_state.abort_group(group, f"rank {group.rank} waited in vain")
        return reason, True

    results = run_on_ranks(abort, 3, timeout=20)

    assert results == [("out of memory", True)] * 3


def test_aborted_group_leaves_groups_of_other_ranks_usable():
    def abort():
        nxd_state.initialize_model_parallel(2)
        nxd_state.abort_group(nxd_state.get_group("tp"), "no reason")
        return nxd_state.all_reduce(torch.ones(1), nxd_state.get_world_group()).item()

    assert run_on_ranks(abort, 4, timeout=20) == [4.0] * 4


def test_group_of_another_backend_is_aborted_by_torch_and_names_the_first_reason():
    """As over nccl, which needs a device for each rank: the backend stands in for it, and notes what it is told."""

    def abort():
        class Noting(dist.ProcessGroup):
            aborts, group_name = 0, "noting"

            def abort(self):
                self.aborts += 1

        def make(store, rank, size, timeout):
            return Noting(rank, size)

        dist.Backend.register_backend("noting", make, devices=["cpu"])
        nxd_state.initialize_model_parallel(dist.get_world_size())
        group = nxd_state.group_of(dist.new_group([0, 1], backend="noting"))
        nxd_state.barrier(nxd_state.get_world_group())
        if group.rank == 1:
            nxd_state.recv(torch.empty(1), nxd_state.get_world_group(), source=0)  # so that rank 0 is the first
        reason = nxd_state.abort_group(group, f"rank {group.rank} failed")
        if group.rank == 0:
            nxd_state.send(torch.ones(1), nxd_state.get_world_group(), destination=1)
        return reason, group.process_group.aborts

    assert run_on_ranks(abort, 2, timeout=20) == [("rank 0 failed", 1)] * 2


def test_aborting_a_group_of_one_gives_its_reason():
    assert nxd_state.abort_group(nxd_state.Group.solo("pp"), "why") == "why"
