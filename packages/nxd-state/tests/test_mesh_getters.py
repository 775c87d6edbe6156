"""Getters of ranks and groups, on a mesh of two tensor-parallel ranks by two stages, and groups of any ranks."""

import pytest
import torch
import torch.distributed as dist
from nxd_state import all_reduce, get_group, group_among, group_of, initialize_model_parallel, mesh_getters


def on_mesh(run_ranks, job, world=4, **degrees):
    def meshed():
        initialize_model_parallel(**degrees)
        return job()

    return run_ranks(meshed, world)


def test_ranks_before_and_behind_and_first_of_groups(run_ranks):
    def job():
        return (
            mesh_getters.get_pipeline_model_parallel_next_rank(),
            mesh_getters.get_pipeline_model_parallel_prev_rank(),
            mesh_getters.get_tensor_model_parallel_src_rank(),
            mesh_getters.get_data_parallel_src_rank(),
            mesh_getters.rmsg("here"),
            mesh_getters.rmsg_ep("here"),
            mesh_getters.get_rank_info_str(),
        )

    places = on_mesh(run_ranks, job, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)

    assert [place[:4] for place in places] == [(2, 2, 0, 0), (3, 3, 0, 1), (0, 0, 2, 2), (1, 1, 2, 3)]
    assert places[3][4:] == ("[rank_3_pp1_tp1_dp0_cp0] here", "[pp1|ep0|tp1|dp0] here", "DP_0_TP_1_PP_1")


def test_replica_groups_of_every_axis_are_those_of_the_mesh(run_ranks):
    names = ("tensor_model", "data", "pipeline_model", "context_model", "expert_model", "expert_data")

    def job():
        asked = [getattr(mesh_getters, f"get_{name}_parallel_replica_groups")() for name in names]
        listed = [getattr(mesh_getters, f"get_{name}_parallel_group")(as_list=True) for name in names]
        assert asked == listed
        return asked, mesh_getters.get_zero1_sharding_groups(), mesh_getters.get_context_model_parallel_src_tgt_pairs()

    asked, sharding, pairs = on_mesh(run_ranks, job, tensor_model_parallel_size=2, context_parallel_size=2)[0]

    singles = [[0], [1], [2], [3]]
    assert asked == [[[0, 1], [2, 3]], singles, singles, [[0, 2], [1, 3]], singles, [[0, 2], [1, 3]]]
    assert sharding == [[0, 2], [1, 3]]
    assert pairs == [[0, 2], [2, 0]]


def test_neighbouring_stages_have_groups_that_carry_messages(run_ranks):
    def job():
        group = get_group("pp")
        sent = torch.tensor([float(group.rank)])
        received = torch.empty(1)
        forward, backward = mesh_getters.get_next_rank_group(), mesh_getters.get_prev_rank_group()
        outgoing = dist.isend(sent, mesh_getters.get_pipeline_model_parallel_next_rank(), group=forward)
        dist.recv(received, mesh_getters.get_pipeline_model_parallel_prev_rank(), group=backward)
        outgoing.wait()
        return received.item(), mesh_getters.get_next_rank_replica_groups(), mesh_getters.get_prev_rank_replica_groups()

    stages = on_mesh(run_ranks, job, 3, pipeline_model_parallel_size=3)

    assert [it[0] for it in stages] == [2.0, 0.0, 1.0]
    assert stages[1][1:] == ([[1, 2]], [[0, 1], [2, 0]])


def test_group_of_some_stages_is_made_by_them_alone(run_ranks):
    def job():
        made = mesh_getters.create_pg_with_ranks([0, 2])
        with pytest.raises(ValueError, match=r"stage 3 does not exist; use 0\.\.2"):
            mesh_getters.create_pg_with_ranks([3])
        return None if made is None else dist.get_process_group_ranks(made)

    assert on_mesh(run_ranks, job, 3, pipeline_model_parallel_size=3) == [[0, 2], None, [0, 2]]


def test_group_of_a_process_group_is_the_meshs_or_its_own(run_ranks):
    def job():
        assert group_of(mesh_getters.get_tensor_model_parallel_group()) is get_group("tp")
        foreign = [dist.new_group([0, 3]), dist.new_group([1, 2])][dist.get_rank() in (1, 2)]
        group = group_of(foreign)
        assert group_of(foreign) is group
        with pytest.raises(ValueError, match="is a int, not a process group of this rank"):
            group_of(3)
        return all_reduce(torch.tensor(float(dist.get_rank())), group).item()

    assert on_mesh(run_ranks, job, tensor_model_parallel_size=2) == [3.0] * 4


def test_group_of_overlapping_messages_is_not_that_of_an_axis(run_ranks):
    def make():
        initialize_model_parallel(2)
        runs = get_group("tp").replica_groups
        apart = group_among(runs, messages="sharding")
        again = group_among(runs, messages="sharding")
        sums = all_reduce(torch.ones(1), apart).item()
        return (
            apart.ranks == get_group("tp").ranks,
            apart is get_group("tp"),
            group_among(runs) is apart,
            again is apart,
            sums,
        )

    assert run_ranks(make, 4) == [(True, False, False, True, 2.0)] * 4


def test_group_among_given_ranks_is_made_once_or_is_an_axis(run_ranks):
    def job():
        assert group_among([[0, 1], [2, 3]]) is get_group("tp")
        if dist.get_rank() == 3:
            with pytest.raises(ValueError, match=r"rank 3 is in none of the groups \[\[0, 1, 2\]\]"):
                group_among([[0, 1, 2]])
            return None
        group = group_among([[0, 1, 2]])
        assert group_among([[0, 1, 2]]) is group
        return all_reduce(torch.ones(()), group).item()

    assert on_mesh(run_ranks, job, tensor_model_parallel_size=2) == [3.0, 3.0, 3.0, None]


def test_messages_without_a_mesh_name_no_place():
    assert mesh_getters.rmsg("here").endswith("pp-1_tp-1_dp-1_cp-1] here")
    assert mesh_getters.get_rank_info_str() == "model_parallel_uninitialized"
