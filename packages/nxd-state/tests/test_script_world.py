"""A script that asks torch.distributed sees the replicas alone, and what concerns all ranks still works."""

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_testing import run_on_ranks

SEEN = [(0, 2), (0, 2), (1, 2), (1, 2)]  # rank and world size at TP 2 x DP 2


def seen():
    return dist.get_rank(), dist.get_world_size()


def start():
    nxd_state.initialize_model_parallel(2)
    nxd_state.show_replicas_as_world()


def test_script_sees_the_replicas():
    def answers():
        start()
        own = torch.tensor([10.0 * nxd_state.rank_of_job()])
        parts = [torch.empty(1), torch.empty(1)]
        dist.all_gather(parts, own)
        told = [nxd_state.rank_of_job()]
        dist.broadcast_object_list(told, src=0)
        dist.barrier()
        return seen(), [it.item() for it in parts], told[0]

    assert run_on_ranks(answers, 4) == [
        ((0, 2), [0.0, 20.0], 0),
        ((0, 2), [10.0, 30.0], 1),
        ((1, 2), [0.0, 20.0], 0),
        ((1, 2), [10.0, 30.0], 1),
    ]


@pytest.mark.parametrize("debug", ["0", "1"])
def test_groups_of_the_mesh_are_those_of_all_ranks(debug):
    def answers():
        start()
        rank = nxd_state.rank_of_job()
        value = torch.tensor([10.0**rank])
        of_tp, of_dp, of_all = (nxd_state.all_reduce(value, it).item() for it in groups())
        return of_tp, of_dp, of_all, nxd_state.all_gather_object(rank, nxd_state.get_world_group())

    def groups():
        return nxd_state.get_group("tp"), nxd_state.get_group("dp"), nxd_state.get_world_group()

    everybody = [0, 1, 2, 3]
    assert run_on_ranks(answers, 4, env={"NXD_DEBUG_COLLECTIVES": debug}) == [
        (11.0, 101.0, 1111.0, everybody),
        (11.0, 1010.0, 1111.0, everybody),
        (1100.0, 101.0, 1111.0, everybody),
        (1100.0, 1010.0, 1111.0, everybody),
    ]


def test_groups_that_are_made_later_connect():
    def answers():
        nxd_state.initialize_model_parallel(4)
        nxd_state.show_replicas_as_world()
        pair = nxd_state.subgroup("tp", 2)
        crossed = nxd_state.group_among([[0, 3], [1, 2]])
        rank = nxd_state.rank_of_job()
        return seen(), nxd_state.all_gather_object(rank, pair), nxd_state.all_gather_object(rank, crossed)

    assert run_on_ranks(answers, 4) == [
        ((0, 1), [0, 1], [0, 3]),
        ((0, 1), [0, 1], [1, 2]),
        ((0, 1), [2, 3], [1, 2]),
        ((0, 1), [2, 3], [0, 3]),
    ]


def test_in_a_block_torch_has_all_ranks():
    def answers():
        start()
        with nxd_state.all_ranks():
            inside = seen()
        return inside, seen()

    assert run_on_ranks(answers, 4) == [((rank, 4), it) for rank, it in enumerate(SEEN)]


def test_end_of_the_mesh_shows_all_ranks_again():
    def answers():
        start()
        nxd_state.destroy_model_parallel()
        first = seen()
        start()
        return first, seen()

    assert run_on_ranks(answers, 4) == [((rank, 4), it) for rank, it in enumerate(SEEN)]


def test_script_may_end_torch_distributed():
    def answers():
        start()
        dist.destroy_process_group()
        nxd_state.destroy_model_parallel()
        nxd_state.initialize_model_parallel(2)
        return seen()

    assert run_on_ranks(answers, 4) == [(rank, 4) for rank in range(4)]


def test_without_model_parallelism_nothing_changes():
    def answers():
        nxd_state.initialize_model_parallel()
        world = dist.group.WORLD
        nxd_state.show_replicas_as_world()
        return dist.group.WORLD is world

    assert run_on_ranks(answers, 2) == [True, True]
