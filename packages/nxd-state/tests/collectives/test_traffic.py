"""What a block of code sends is counted by axis, as a ring would send it, whatever the transport."""

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import Receive, Send, count_traffic
from nxd_testing import run_on_ranks

CALLS = {
    "all_reduce": nxd_state.all_reduce,
    "all_reduce_coalesced_": lambda x, group: nxd_state.all_reduce_coalesced_([x, x], group),
    "all_gather": nxd_state.all_gather,
    "all_gather_": nxd_state.all_gather_,
    "reduce_scatter": nxd_state.reduce_scatter,
    "reduce_scatter_mean": lambda x, group: nxd_state.reduce_scatter_mean(
        x, group, sum_dtype=torch.float64, dtype=torch.float32
    ).wait(),
    "all_to_all": lambda x, group: nxd_state.all_to_all(x, group, split_dim=0, concat_dim=0),
    "all_to_all_v": lambda x, group: nxd_state.all_to_all_v(
        x,
        group,
        send_counts=[len(x) if it == group.rank else 0 for it in range(group.size)],
        receive_counts=[len(x) if it == group.rank else 0 for it in range(group.size)],
    ),
    "broadcast": nxd_state.broadcast,
}
# Of 12 float32, 48 bytes, on 3 ranks.
SENT = {
    "all_reduce": 64,
    "all_reduce_coalesced_": 128,
    "all_gather": 96,
    "all_gather_": 32,
    "reduce_scatter": 32,
    "reduce_scatter_mean": 32,
    "all_to_all": 32,
    "all_to_all_v": 0,
    "broadcast": 32,
}


def sent_by_each_call():
    nxd_state.initialize_model_parallel(dist.get_world_size())
    group, sent = nxd_state.get_group("tp"), {}
    for name, call in CALLS.items():
        with count_traffic() as counts:
            call(torch.ones(12), group)
        sent[name] = (list(counts), counts["tp"].calls, counts["tp"].sent_bytes)
    return sent


@pytest.mark.parametrize("env", [{}, {"NXD_SHM": "0"}], ids=["shared memory", "gloo"])
def test_collective_counts_once_with_the_bytes_of_a_ring(env):
    for sent in run_on_ranks(sent_by_each_call, 3, env=env):
        assert sent == {name: (["tp"], 1, num_bytes) for name, num_bytes in SENT.items()}


def sent_in_two_axes():
    nxd_state.initialize_model_parallel(2)
    tp, dp = nxd_state.get_group("tp"), nxd_state.get_group("dp")
    nxd_state.all_reduce(torch.ones(4), tp)
    with count_traffic() as counts:
        nxd_state.all_reduce(torch.ones(4), dp)
        if tp.rank == 0:
            nxd_state.send(torch.ones(5), tp, destination=1)
            received = nxd_state.recv(torch.ones(1), tp, source=1)
        else:
            received = nxd_state.recv(torch.ones(5), tp, source=0)
            (pending,) = nxd_state.batch_isend_irecv([Send(torch.ones(1), 0)], tp)
            pending.wait()
        nxd_state.batch_isend_irecv([Send(received[:1], 1 - tp.rank), Receive(torch.ones(1), 1 - tp.rank)], tp)[
            1
        ].wait()
        nxd_state.barrier(tp)
        tp_calls = counts["tp"].calls
    nxd_state.all_reduce(torch.ones(4), tp)
    return tp_calls, {axis: (it.calls, it.sent_bytes) for axis, it in counts.items()}


def test_messages_count_where_they_are_sent_and_axes_apart():
    results = run_on_ranks(sent_in_two_axes, 4)

    assert results[0] == (2, {"dp": (1, 16), "tp": (2, 24)})
    assert results[1] == (2, {"dp": (1, 16), "tp": (2, 8)})


def test_nested_count_is_refused():
    with count_traffic(), pytest.raises(RuntimeError, match="already active"), count_traffic():
        pass
