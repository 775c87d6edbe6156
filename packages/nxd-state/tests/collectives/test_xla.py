"""Collectives on XLA against what one process computes from all ranks' inputs, run by the replica harness."""

import nxd_state
import pytest
import torch
from nxd_doctor.graphs import find_collectives, parse_hlo
from nxd_testing import RankFailure, run_on_replicas
from nxd_testing.replicas import executed_graphs

pytestmark = pytest.mark.xla

WORLD_SIZE = 4


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    return [((torch.arange(4 * 8) * 5 + 3 * rank) % 7).view(4, 8).to(dtype) for rank in range(WORLD_SIZE)]


def every_collective(dtype: torch.dtype):
    nxd_state.initialize_model_parallel(2)
    group, mine = nxd_state.get_group("tp"), inputs(dtype)[nxd_state.get_world_group().rank].to(nxd_state.get_device())
    in_place, several = mine.clone(), [mine + 1, mine[:, :2] + 2]
    nxd_state.all_reduce_coalesced_(several, group)
    results = {
        **{op: nxd_state.all_reduce(mine, group, op=op) for op in ("sum", "max", "min")},
        "in place": nxd_state.all_reduce_(in_place, group),
        "coalesced": several,
        "gathered": [nxd_state.all_gather(mine, group, dim=dim) for dim in (0, 1)],
        "scattered": [nxd_state.reduce_scatter(mine, group, dim=dim) for dim in (0, 1)],
        "gathered in place": nxd_state.all_gather_(mine.clone(), group),
        "exchanged": nxd_state.all_to_all(mine, group, split_dim=1, concat_dim=0),
        "broadcast": [nxd_state.broadcast(mine, group, source=source) for source in (0, 1)],
        "in the background": nxd_state.all_gather(mine, group, async_op=True).wait(),
        "input": mine,
    }
    if dtype.is_floating_point:
        results["avg"] = nxd_state.all_reduce(mine, group, op="avg")
        results["mean part"] = nxd_state.reduce_scatter(mine, group, dim=1, op="avg")
    nxd_state.step_boundary()
    assert len(executed_graphs()) == 1
    return torch.utils._pytree.tree_map(lambda tensor: tensor.cpu(), results)


def expected_results(rank: int, dtype: torch.dtype):
    ranks = (0, 1) if rank < 2 else (2, 3)
    first, second = (inputs(dtype)[it] for it in ranks)
    mine, index = inputs(dtype)[rank], rank % 2
    total = first + second
    expected = {
        "sum": total,
        "max": torch.maximum(first, second),
        "min": torch.minimum(first, second),
        "in place": total,
        "coalesced": [total + 2, total[:, :2] + 4],
        "gathered": [torch.cat([first, second], dim=dim) for dim in (0, 1)],
        "scattered": [total.chunk(2, dim=dim)[index] for dim in (0, 1)],
        "gathered in place": torch.cat([first.chunk(2)[0], second.chunk(2)[1]]),
        "exchanged": torch.cat([it.chunk(2, dim=1)[index] for it in (first, second)]),
        "broadcast": [first, second],
        "in the background": torch.cat([first, second]),
        "input": mine,
    }
    if dtype.is_floating_point:
        expected |= {"avg": total / 2, "mean part": (total / 2).chunk(2, dim=1)[index]}
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_collective_of_two_groups_gives_what_one_process_computes(dtype):
    for rank, found in enumerate(run_on_replicas(every_collective, WORLD_SIZE, dtype)):
        torch.testing.assert_close(found, expected_results(rank, dtype), rtol=0, atol=0)


def test_ranks_may_differ_in_what_needs_no_other_rank():
    def fill():
        nxd_state.initialize_model_parallel(2)
        rank = nxd_state.get_group("tp").rank
        kept = torch.arange(2 + rank, device=nxd_state.get_device()) * 2
        nxd_state.step_boundary()
        return kept

    assert [found.tolist() for found in run_on_replicas(fill, 2)] == [[0, 2], [0, 2, 4]]


def test_flags_are_broadcast_as_flags():
    def broadcast():
        nxd_state.initialize_model_parallel(2)
        group = nxd_state.get_group("tp")
        flags = torch.tensor([True, False, group.rank == 1], device=nxd_state.get_device())
        found = nxd_state.broadcast(flags, group, source=1)
        nxd_state.step_boundary()
        return found

    for found in run_on_replicas(broadcast, 2):
        assert found.tolist() == [True, False, True]


def test_rank_as_a_constant_of_the_graph_is_an_error_that_shows_the_difference():
    def add_rank():
        nxd_state.initialize_model_parallel(2)
        group = nxd_state.get_group("tp")
        kept = nxd_state.all_reduce(torch.arange(3, device=nxd_state.get_device()).roll(group.rank), group)
        nxd_state.step_boundary()
        return kept

    with pytest.raises(RankFailure, match=r"rank 1 recorded another graph than rank 0(.|\n)*use Group\.rank_tensor"):
        run_on_replicas(add_rank, 2)


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.item(),
        float,
        bool,
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.to("cpu"),
        lambda tensor: tensor.tolist(),
    ],
)
def test_reading_what_is_not_computed_yet_is_an_error(read):
    def read_early():
        nxd_state.initialize_model_parallel()
        read(torch.arange(3, device=nxd_state.get_device()).sum())

    with pytest.raises(RankFailure, match=r"is not computed yet.*read it after step_boundary"):
        run_on_replicas(read_early, 1)


def test_state_goes_on_from_step_to_step_in_one_graph():
    def count():
        nxd_state.initialize_model_parallel(2)
        group, device = nxd_state.get_group("tp"), nxd_state.get_device()
        total, share = torch.zeros(2, device=device), torch.tensor([1.0, group.rank], device=device)
        for _ in range(4):
            total += nxd_state.all_reduce(share, group)
            nxd_state.step_boundary()
        return total, [graph.is_new for graph in executed_graphs()]

    for total, is_new in run_on_replicas(count, 2):
        assert total.tolist() == [8.0, 4.0]
        assert is_new[-2:] == [False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_batch_of_messages_goes_both_ways_round_the_ring(dtype):
    def exchange():
        nxd_state.initialize_model_parallel(WORLD_SIZE)
        group, device = nxd_state.get_group("tp"), nxd_state.get_device()
        before, behind = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        mine = inputs(dtype)[group.rank].to(device)
        buffers = {peer: torch.empty(8, 4, dtype=dtype, device=device) for peer in (behind, before)}
        messages = [nxd_state.Receive(buffer, peer) for peer, buffer in buffers.items()]
        messages += [nxd_state.Send(mine.t(), peer) for peer in (before, behind)]
        for pending in nxd_state.batch_isend_irecv(messages, group):
            pending.wait()
        nxd_state.step_boundary()
        return all(torch.equal(buffer.cpu(), inputs(dtype)[peer].t()) for peer, buffer in buffers.items())

    assert run_on_replicas(exchange, WORLD_SIZE) == [True] * WORLD_SIZE


def test_message_of_each_of_two_pipelines_is_one_permute_between_its_two_ends():
    def pass_on():
        nxd_state.initialize_model_parallel(1, 2)
        group, rank = nxd_state.get_group("pp"), nxd_state.get_world_group().rank
        tensor = torch.full((3,), float(rank + 1), device=nxd_state.get_device())
        if group.rank == 0:
            nxd_state.send(tensor, group, destination=1)
        else:
            nxd_state.recv(tensor, group, source=0)
        nxd_state.step_boundary()
        shared = [graph for graph in executed_graphs() if len(graph.ranks) > 1]
        return tensor, [(graph.ranks, find_collectives(parse_hlo(graph.text))) for graph in shared]

    found = run_on_replicas(pass_on, WORLD_SIZE)

    assert [tensor.tolist() for tensor, _ in found] == [[1.0] * 3, [2.0] * 3, [1.0] * 3, [2.0] * 3]
    for rank, (_, [(ranks, [permute])]) in enumerate(found):
        assert ranks == ((0, 2), (1, 3))[rank % 2]
        assert (permute.kind, permute.groups, permute.bytes_sent) == ("collective-permute", ((0, 2), (1, 3)), 12)


def test_messages_in_another_order_at_their_two_ends_are_an_error():
    def cross():
        nxd_state.initialize_model_parallel(1, 2)
        group, tensor = nxd_state.get_group("pp"), torch.ones(2, device=nxd_state.get_device())
        nxd_state.send(tensor, group, destination=1 - group.rank)
        nxd_state.recv(tensor, group, source=1 - group.rank)

    with pytest.raises(RankFailure, match="recorded another graph than rank"):
        run_on_replicas(cross, 2)


def test_rank_that_does_not_come_to_a_collective_is_an_error_of_those_that_do():
    def leave():
        nxd_state.initialize_model_parallel(2)
        group = nxd_state.get_group("tp")
        total = torch.arange(3, device=nxd_state.get_device()) + 1
        if group.rank == 0:
            total = nxd_state.all_reduce(total, group)
        nxd_state.step_boundary()
        return total

    with pytest.raises(RankFailure, match=r"rank 1 has ended, and rank 0 .* between ranks \[0, 1\]"):
        run_on_replicas(leave, 2)


def test_collective_between_stages_is_a_graph_of_its_own():
    def norm():
        nxd_state.initialize_model_parallel(1, 2)
        stages, device = nxd_state.get_group("pp"), nxd_state.get_device()
        share = torch.arange(4, device=device).float()
        share = share.sum() if stages.rank == 0 else (share * share).max()  # stages compute different things
        total = nxd_state.all_reduce(share, stages) * 2
        nxd_state.step_boundary()
        return total, [len(graph.ranks) for graph in executed_graphs()]

    for total, connected in run_on_replicas(norm, 2):
        assert total.item() == 2 * (6 + 9)
        assert connected == [1, 2, 1]
