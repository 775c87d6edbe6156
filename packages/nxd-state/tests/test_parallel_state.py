"""The mesh of this process: initialize, ask, destroy. A world of one runs here, larger ones on worker processes."""

import pickle
from importlib.machinery import ModuleSpec

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_state import mesh
from nxd_testing import run_on_ranks

pytestmark = pytest.mark.smoke

GETTERS = [getattr(nxd_state, name) for name in nxd_state.__all__ if name.startswith("get_") and "parallel" in name]


@pytest.fixture
def clean_world(monkeypatch):
    """No launcher's environment before the test, no mesh and no torch.distributed after it."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    nxd_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("own_world", [True, False])
def test_mesh_is_forgotten_when_torch_distributed_was_ended_and_started_again(clean_world, own_world):
    def start_torch_distributed():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    if not own_world:
        start_torch_distributed()
    nxd_state.initialize_model_parallel()
    dist.destroy_process_group()
    start_torch_distributed()

    nxd_state.initialize_model_parallel()

    assert torch.equal(nxd_state.all_reduce(torch.ones(1), nxd_state.get_world_group()), torch.ones(1))
    dist.destroy_process_group()
    start_torch_distributed()
    nxd_state.destroy_model_parallel()
    assert dist.is_initialized()  # it is not the one of the mesh


@pytest.mark.parametrize("getter", [nxd_state.get_mesh, nxd_state.get_world_group, *GETTERS])
def test_getter_before_initialize_raises(getter):
    with pytest.raises(RuntimeError, match=r"not initialized; call initialize_model_parallel\(\) first"):
        getter()


def test_is_initialized_follows_initialize_and_destroy(clean_world):
    before = nxd_state.model_parallel_is_initialized()
    nxd_state.initialize_model_parallel()
    during = nxd_state.model_parallel_is_initialized()
    nxd_state.destroy_model_parallel()

    assert (before, during, nxd_state.model_parallel_is_initialized()) == (False, True, False)


def test_default_device_without_values_does_not_matter_to_initialize(clean_world):
    with torch.device("meta"):
        nxd_state.initialize_model_parallel()

    assert nxd_state.get_mesh().groups("tp") == ((0,),)


def test_initialize_without_launcher_is_a_world_of_one(clean_world):
    nxd_state.initialize_model_parallel()

    assert nxd_state.get_world_group().ranks == (0,)
    assert [getter() for getter in GETTERS if getter.__name__.endswith("_size")] == [1] * 8
    assert [getter() for getter in GETTERS if getter.__name__.endswith("_rank")] == [0] * 6
    assert torch.equal(nxd_state.all_reduce(torch.ones(2), nxd_state.get_world_group()), torch.ones(2))


def test_initialize_twice_raises_naming_the_mesh(clean_world):
    nxd_state.initialize_model_parallel()

    with pytest.raises(RuntimeError, match=r"already initialized as Mesh\(world_size=1, .*destroy_model_parallel"):
        nxd_state.initialize_model_parallel()


def test_initialize_with_impossible_degree_raises_and_starts_nothing(clean_world):
    with pytest.raises(ValueError, match="tp=2 = 2 does not divide world_size=1"):
        nxd_state.initialize_model_parallel(tensor_model_parallel_size=2)

    assert not nxd_state.model_parallel_is_initialized()
    assert not dist.is_initialized()


def test_destroy_ends_the_torch_distributed_that_initialize_started(clean_world):
    nxd_state.initialize_model_parallel()
    nxd_state.destroy_model_parallel()

    assert not dist.is_initialized()


def test_destroy_leaves_the_torch_distributed_of_the_caller(clean_world):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    nxd_state.initialize_model_parallel()
    groups_during = dist.get_pg_count()

    nxd_state.destroy_model_parallel()

    assert dist.is_initialized()
    assert dist.get_pg_count() <= groups_during


def test_destroy_without_mesh_does_nothing():
    nxd_state.destroy_model_parallel()

    assert not nxd_state.model_parallel_is_initialized()


def test_destroy_after_the_caller_ended_torch_distributed_forgets_the_mesh(clean_world):
    nxd_state.initialize_model_parallel()
    dist.destroy_process_group()

    nxd_state.destroy_model_parallel()

    assert not nxd_state.model_parallel_is_initialized()


def test_initialize_again_after_destroy_works(clean_world):
    for _ in range(3):
        nxd_state.initialize_model_parallel()
        nxd_state.destroy_model_parallel()

    assert not dist.is_initialized()


def test_get_group_unknown_axes_raises_naming_those_there_are(clean_world):
    nxd_state.initialize_model_parallel()

    with pytest.raises(ValueError, match=r"no group for axes \('dp', 'tp'\); use one of .*'dp\+cp'"):
        nxd_state.get_group("dp", "tp")


def test_active_group_without_mesh_is_a_group_of_one():
    group = nxd_state.active_group("tp")

    assert (group.size, group.rank, group.process_group) == (1, 0, None)


def test_getters_of_four_ranks_agree_with_the_mesh():
    def answers():
        nxd_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        return {
            "tp": (
                nxd_state.get_tensor_model_parallel_size(),
                nxd_state.get_tensor_model_parallel_rank(),
                nxd_state.get_tensor_model_parallel_group(as_list=True),
                dist.get_process_group_ranks(nxd_state.get_tensor_model_parallel_group()),
            ),
            "pp": (
                nxd_state.get_pipeline_model_parallel_size(),
                nxd_state.get_pipeline_model_parallel_rank(),
                nxd_state.get_pipeline_model_parallel_group(as_list=True),
                dist.get_process_group_ranks(nxd_state.get_pipeline_model_parallel_group()),
            ),
            "dp": (
                nxd_state.get_data_parallel_size(),
                nxd_state.get_data_parallel_rank(),
                nxd_state.get_data_parallel_group(as_list=True),
                dist.get_process_group_ranks(nxd_state.get_data_parallel_group()),
            ),
            "aliases": (nxd_state.get_tensor_parallel_size(), nxd_state.get_data_parallel_world_size()),
        }

    by_rank = run_on_ranks(answers, 4)

    for rank, answer in enumerate(by_rank):
        pp, tp = divmod(rank, 2)
        assert answer == {
            "tp": (2, tp, [[0, 1], [2, 3]], [2 * pp, 2 * pp + 1]),
            "pp": (2, pp, [[0, 2], [1, 3]], [tp, tp + 2]),
            "dp": (1, 0, [[0], [1], [2], [3]], [rank]),
            "aliases": (2, 1),
        }


def test_getters_with_context_and_expert_axes_agree_with_the_mesh():
    def answers():
        nxd_state.initialize_model_parallel(2, 1, 2, context_parallel_size=2)
        return (
            (nxd_state.get_context_parallel_size(), nxd_state.get_context_parallel_rank()),
            (nxd_state.get_expert_model_parallel_size(), nxd_state.get_expert_model_parallel_rank()),
            nxd_state.get_group("dp", "cp").ranks,
            nxd_state.get_group("pp", "tp").ranks,
            nxd_state.get_group("dp_exp").ranks,
            nxd_state.get_mesh() == nxd_state.Mesh(4, cp=2, tp=2, ep=2),
        )

    by_rank = run_on_ranks(answers, 4)

    for rank, answer in enumerate(by_rank):
        outer, tp = divmod(rank, 2)
        assert answer == (
            (2, outer),
            (2, outer),
            (tp, tp + 2),
            (2 * outer, 2 * outer + 1),
            (rank,),
            True,
        )


def test_embedding_group_is_missing_on_a_middle_stage():
    def members():
        nxd_state.initialize_model_parallel(pipeline_model_parallel_size=3)
        try:
            return nxd_state.get_group("embedding").ranks
        except ValueError as error:
            return str(error)

    first, middle, last = run_on_ranks(members, 3)

    assert first == last == (0, 2)
    assert "no group for axes ('embedding',)" in middle


def test_every_group_of_every_axis_communicates_among_its_own_ranks():
    def gathered():
        nxd_state.initialize_model_parallel(2, 2)
        rank = torch.tensor([dist.get_rank()])
        groups = [nxd_state.get_group(*axes) for axes in (("tp",), ("pp",), ("pp", "tp"), ("dp", "cp"), ("embedding",))]
        return [(tuple(nxd_state.all_gather(rank, group).tolist()), group.ranks) for group in groups]

    for answers in run_on_ranks(gathered, 4):
        assert all(found == ranks for found, ranks in answers)


def test_group_whose_ranks_descend_keeps_the_order_of_the_mesh():
    def orders():
        mesh.RANK_ORDERS["first_with_last"] = lambda world_size, tp: [0, 3, 2, 1]
        nxd_state.initialize_model_parallel(2, rank_order="first_with_last")
        rank = torch.tensor([dist.get_rank()])
        tp, dp = nxd_state.get_group("tp"), nxd_state.get_group("dp")
        eager = [nxd_state.all_gather(rank, group).tolist() for group in (tp, dp)]
        scattered = nxd_state.reduce_scatter(torch.tensor([10, 20]), dp).tolist()
        sent = nxd_state.broadcast(rank, dp, source=1).tolist()
        compiled = torch.compile(
            lambda x: (nxd_state.all_gather(x, dp), nxd_state.broadcast(x, dp, source=1)),
            fullgraph=True,
            backend="aot_eager",
        )
        return tp.ranks, dp.ranks, dp.rank, eager, scattered, sent, [part.tolist() for part in compiled(rank)]

    by_rank = run_on_ranks(orders, 4)

    assert by_rank[3] == ((0, 3), (3, 1), 0, [[0, 3], [3, 1]], [20], [1], [[3, 1], [1]])
    assert by_rank[1] == ((2, 1), (3, 1), 1, [[2, 1], [3, 1]], [40], [1], [[3, 1], [1]])


def test_initialize_with_groups_of_the_callers_own_on_some_ranks_still_connects():
    def total():
        mine = dist.new_group([0, 1])  # ranks 2 and 3 are no members, so they have made one group less
        nxd_state.initialize_model_parallel(2)
        summed = nxd_state.all_reduce(torch.ones(1), nxd_state.get_group("dp"))
        nxd_state.destroy_model_parallel()
        return summed.item(), mine is not dist.GroupMember.NON_GROUP_MEMBER

    assert run_on_ranks(total, 4, timeout=20) == [(2.0, True), (2.0, True), (2.0, False), (2.0, False)]


def test_initialize_again_with_other_degrees_under_the_callers_world_connects_anew():
    def totals():
        found = []
        for degree in (1, 2, 4, 2, 1):
            nxd_state.initialize_model_parallel(degree)
            found.append(nxd_state.all_reduce(torch.ones(1), nxd_state.get_group("tp")).item())
            nxd_state.destroy_model_parallel()
        return found

    assert run_on_ranks(totals, 4, timeout=30) == [[1.0, 2.0, 4.0, 2.0, 1.0]] * 4


def test_initialize_again_with_a_world_of_its_own_connects_anew():
    def totals():
        dist.destroy_process_group()
        found = []
        for degree in (1, 2) * 6:
            nxd_state.initialize_model_parallel(degree)
            found.append(nxd_state.all_reduce(torch.ones(1), nxd_state.get_world_group()).item())
            nxd_state.destroy_model_parallel()
        return found, dist.is_initialized()

    assert run_on_ranks(totals, 2, timeout=30) == [([2.0] * 12, False)] * 2


def test_initialize_impossible_degree_raises_on_every_rank():
    def message():
        with pytest.raises(ValueError, match="does not divide") as raised:
            nxd_state.initialize_model_parallel(3)
        return str(raised.value)

    expected = "pp=1 x cp=1 x tp=3 = 3 does not divide world_size=2; use tp=1 or 2"
    assert run_on_ranks(message, 2) == [expected] * 2


def test_initialize_several_ranks_on_torch_xlas_cpu_raises_what_to_do(clean_world, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin=name))

    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2 with PJRT_DEVICE=CPU.*NXD_DEVICE=cpu.*run_on_replicas"):
        nxd_state.initialize_model_parallel()


def test_planned_world_lays_out_a_rank_that_does_not_run(clean_world):
    with nxd_state.planned_world(64, rank=13):
        nxd_state.initialize_model_parallel(8, 4)
        places = nxd_state.get_tensor_model_parallel_rank(), nxd_state.get_pipeline_model_parallel_rank()
        ranks = nxd_state.get_group("pp").ranks

    assert places == (5, 0)
    assert ranks == (13, 29, 45, 61)
    assert not nxd_state.model_parallel_is_initialized()
    assert not dist.is_initialized()


def test_planned_process_group_says_its_size_and_becomes_that_of_the_rank_that_unpickles_it(clean_world):
    with nxd_state.planned_world(8, rank=5):
        nxd_state.initialize_model_parallel(4)
        planned = nxd_state.get_tensor_model_parallel_group()
        places = planned.size(), planned.rank()
        sent = pickle.dumps(planned)
    nxd_state.initialize_model_parallel()

    assert places == (4, 1)
    assert pickle.loads(sent) is nxd_state.get_tensor_model_parallel_group()


def test_planned_world_inside_a_mesh_raises(clean_world):
    nxd_state.initialize_model_parallel()

    with pytest.raises(RuntimeError, match="already initialized"), nxd_state.planned_world(2):
        pass


def test_planned_rank_outside_of_its_world_raises():
    with pytest.raises(ValueError, match=r"rank=4 is outside 0\.\.3"), nxd_state.planned_world(4, rank=4):
        pass
