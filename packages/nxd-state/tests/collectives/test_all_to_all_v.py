"""`all_to_all_v` on real ranks, through shared memory and through torch.distributed."""

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_testing import run_on_ranks

PAIR = nxd_state.Group("tp", ranks=(0, 1), rank=0, replica_groups=((0, 1),))
# Rows from each rank to each.
EXCHANGES = {
    "uneven": [[2, 3, 1], [0, 1, 4], [5, 0, 2]],
    "all to one": [[0, 4, 0], [0, 1, 0], [0, 2, 0]],
    "nothing": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    "large": [[1, 7_000, 2], [3, 0, 1], [5_000, 1, 0]],
}
TRANSPORTS = {"shared memory": {}, "gloo": {"NXD_SHM": "0"}}


@pytest.mark.sample(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_rows_of_each_rank_come_in_group_order(exchange, transport):
    counts = EXCHANGES[exchange]

    def check():
        nxd_state.initialize_model_parallel(dist.get_world_size())
        group = nxd_state.get_group("tp")
        # A row says who sent it, to whom, and which of these it is.
        outgoing = [
            [torch.tensor([[rank, to, row]]) for to, rows in enumerate(counts[rank]) for row in range(rows)]
            for rank in range(group.size)
        ]
        received = [row for rank in outgoing for row in rank if row[0, 1] == group.rank]
        for dtype in (torch.int64, torch.float32, torch.bool):
            empty = torch.empty(0, 3, dtype=dtype)
            mine = torch.cat([empty, *(row.to(dtype) for row in outgoing[group.rank])])
            expected = torch.cat([empty, *(row.to(dtype) for row in received)])
            for tensor in (mine, mine.t().contiguous().t()):
                found = nxd_state.all_to_all_v(
                    tensor,
                    group,
                    send_counts=counts[group.rank],
                    receive_counts=[counts[other][group.rank] for other in range(group.size)],
                )
                assert torch.equal(found, expected)

    run_on_ranks(check, 3, env=TRANSPORTS[transport])


def test_group_of_one_gives_the_tensor_itself():
    tensor = torch.ones(3, 2)

    assert nxd_state.all_to_all_v(tensor, nxd_state.Group.solo("ep"), send_counts=[3], receive_counts=[3]) is tensor


@pytest.mark.parametrize(
    ("send_counts", "receive_counts", "message"),
    [
        ([4], [2, 2], r"send_counts=\[4\] must have a number of rows for each of the 2 ranks"),
        ([5, -1], [5, 0], r"send_counts=\[5, -1\] must have a number of rows"),
        ([1, 2], [1, 1], r"send_counts=\[1, 2\] are 3 rows, but the tensor's shape is \(4, 5\)"),
        ([2, 2], [1, 1], r"differ at this rank's own index 0"),
    ],
)
def test_counts_that_make_no_sense_raise_before_anything_is_sent(send_counts, receive_counts, message):
    with pytest.raises(ValueError, match=message):
        nxd_state.all_to_all_v(torch.ones(4, 5), PAIR, send_counts=send_counts, receive_counts=receive_counts)
