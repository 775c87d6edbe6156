"""Groups of some ranks of an axis: made by their members alone, when they are first asked for."""

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import subgroup
from nxd_testing import run_on_ranks
from torch.distributed import distributed_c10d


def ranks_heard_in(group):
    """The ranks that a collective of this group reaches."""
    return tuple(nxd_state.all_gather(torch.tensor([dist.get_rank()]), group).tolist())


def number_of_process_groups():
    return len(distributed_c10d._world.pg_map)


def test_subgroups_are_runs_of_consecutive_ranks():
    def answers():
        nxd_state.initialize_model_parallel(4)
        group = subgroup("tp", 2)
        return group.ranks, group.rank, group.size, group.axis, group.replica_groups, ranks_heard_in(group)

    runs = ((0, 1), (2, 3))
    by_rank = run_on_ranks(answers, 4)
    assert by_rank == [(runs[rank // 2], rank % 2, 2, "tp", runs, runs[rank // 2]) for rank in range(4)]


def test_subgroups_of_strided_groups_follow_the_order_of_the_axis():
    def answers():
        nxd_state.initialize_model_parallel(1, 2)
        group = subgroup("dp", 2)
        return group.ranks, group.replica_groups, group is nxd_state.get_group("dp")

    assert run_on_ranks(answers, 4)[3] == ((2, 3), ((0, 1), (2, 3)), True)


def test_subgroup_asked_for_again_is_the_same_one():
    def answers():
        nxd_state.initialize_model_parallel(4)
        before = number_of_process_groups()
        groups = [subgroup("tp", 2) for _ in range(3)]
        return groups[0] is groups[1] is groups[2], number_of_process_groups() - before

    assert run_on_ranks(answers, 4) == [(True, 1)] * 4


def test_subgroup_of_one_rank_needs_no_process_group():
    def answers():
        nxd_state.initialize_model_parallel(2)
        group = subgroup("tp", 1)
        total = nxd_state.all_reduce_(torch.ones(1), group).item()
        return group.ranks, group.process_group, group.replica_groups, total

    assert run_on_ranks(answers, 2) == [((rank,), None, ((0,), (1,)), 1.0) for rank in range(2)]


def test_subgroup_made_by_some_ranks_of_the_world_waits_for_no_others():
    def answers():
        nxd_state.initialize_model_parallel(4)
        world = nxd_state.get_world_group()
        heard = []
        for turn in range(2):  # as on pipeline stages, of which only one has a layer that needs the group
            if dist.get_rank() // 2 == turn:
                heard.append(ranks_heard_in(subgroup("tp", 2)))
            nxd_state.barrier(world)
        return heard

    assert run_on_ranks(answers, 4, timeout=30) == [[(0, 1)]] * 2 + [[(2, 3)]] * 2


def test_subgroup_after_destroy_under_the_callers_world_connects_anew():
    def answers():
        heard = []
        for repeat in range(4):
            nxd_state.initialize_model_parallel(4)
            if repeat % 2 == 0 or dist.get_rank() < 2:  # so members differ in how many groups they have made
                heard.append(ranks_heard_in(subgroup("tp", 2)))
            nxd_state.destroy_model_parallel()
        return heard

    assert run_on_ranks(answers, 4, timeout=30) == [[(0, 1)] * 4] * 2 + [[(2, 3)] * 2] * 2


def test_subgroup_after_destroy_with_a_world_of_its_own_connects_anew():
    def answers():
        dist.destroy_process_group()
        heard = []
        for _ in range(3):
            nxd_state.initialize_model_parallel(4)
            heard.append(ranks_heard_in(subgroup("tp", 2)))
            nxd_state.destroy_model_parallel()
        return heard

    assert run_on_ranks(answers, 4, timeout=30) == [[(0, 1)] * 3] * 2 + [[(2, 3)] * 3] * 2


def test_subgroup_is_left_out_of_the_callers_world_after_destroy():
    def answers():
        nxd_state.initialize_model_parallel(4)
        nxd_state.destroy_model_parallel()
        before = number_of_process_groups()
        nxd_state.initialize_model_parallel(4)
        subgroup("tp", 2)
        nxd_state.destroy_model_parallel()
        return number_of_process_groups() - before

    assert run_on_ranks(answers, 4) == [0] * 4


@pytest.mark.parametrize("debug", ["0", "1"])
def test_subgroup_serves_eager_and_compiled_collectives(debug):
    def answers():
        nxd_state.initialize_model_parallel(4)
        group, own = subgroup("tp", 2), torch.tensor([1.0 + dist.get_rank()])
        compiled = torch.compile(lambda x: nxd_state.all_reduce(x, group), fullgraph=True, backend="aot_eager")
        return nxd_state.all_reduce(own, group).item(), compiled(own).item()

    by_rank = run_on_ranks(answers, 4, env={"NXD_DEBUG_COLLECTIVES": debug})
    assert by_rank == [(3.0, 3.0)] * 2 + [(7.0, 7.0)] * 2


@pytest.mark.parametrize("size", [0, 3, 8])
def test_subgroup_of_a_size_that_does_not_divide_raises_on_every_rank(size):
    def message():
        nxd_state.initialize_model_parallel(4)
        with pytest.raises(
            ValueError, match=f"size={size} does not divide the 4 ranks of .*'tp'.*; use a divisor of 4"
        ):
            subgroup("tp", size)

    run_on_ranks(message, 4)


def test_subgroup_of_an_unknown_axis_or_without_mesh_raises():
    with pytest.raises(RuntimeError, match=r"call initialize_model_parallel\(\) first"):
        subgroup("tp", 1)

    def message():
        nxd_state.initialize_model_parallel()
        with pytest.raises(ValueError, match="no group for axes"):
            subgroup("heads", 1)

    run_on_ranks(message, 1)
