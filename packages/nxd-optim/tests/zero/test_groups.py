"""The lists of ranks that the documented API takes, and ranks without a mesh."""

import pytest
import torch
from nxd_optim.zero import NeuronZero1Optimizer
from nxd_state import get_group, initialize_model_parallel
from torch import nn


def make(**arguments):
    return NeuronZero1Optimizer([nn.Parameter(torch.ones(5))], torch.optim.SGD, **arguments)


def test_groups_of_the_mesh_are_found_by_their_ranks(run_ranks):
    def find():
        initialize_model_parallel(2)
        data_parallel = [list(ranks) for ranks in get_group("dp").replica_groups]
        tensor_parallel = [list(ranks) for ranks in get_group("tp").replica_groups]
        named = make(sharding_groups=data_parallel, grad_norm_groups=tensor_parallel)
        return named.group is get_group("dp", "cp"), make().group is get_group("dp", "cp"), data_parallel

    assert run_ranks(find, 4) == [(True, True, [[0, 2], [1, 3]])] * 4


def test_states_sharded_over_data_parallel_ranks_only_are_averaged_over_context_parallel_ranks_too(run_ranks):
    def train():
        initialize_model_parallel(context_parallel_size=2)
        parameter = nn.Parameter(torch.zeros(5))
        data_parallel = [list(ranks) for ranks in get_group("dp").replica_groups]
        optimizer = NeuronZero1Optimizer(
            [parameter], torch.optim.SGD, sharding_groups=data_parallel, max_norm=1e9, lr=1.0, maximize=True
        )
        parameter.grad = torch.full((5,), float(torch.distributed.get_rank()))
        optimizer.step()
        return parameter.tolist(), float(optimizer.grad_norm), optimizer.group.size

    assert run_ranks(train, 4) == [([1.5] * 5, pytest.approx(1.5 * 5**0.5), 2)] * 4


def test_parameter_with_a_gradient_on_one_context_parallel_rank_is_updated_on_all(run_ranks):
    def train():
        initialize_model_parallel(context_parallel_size=2)
        used, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
        optimizer = NeuronZero1Optimizer(
            [used, unused],
            torch.optim.AdamW,
            sharding_groups=[list(ranks) for ranks in get_group("dp").replica_groups],
            lr=0.5,
            weight_decay=0.1,
        )
        if get_group("cp").rank == 1:
            used.grad = torch.ones(3)
        optimizer.step()
        return used.tolist(), unused.tolist()

    for size in (2, 4):  # one data-parallel rank, and two
        assert run_ranks(train, size) == [([pytest.approx(-0.5)] * 3, [1.0] * 3)] * size


def test_norm_over_pipeline_stages_adds_their_parameters_and_counts_tied_weights_once(run_ranks):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        stage = get_group("pp").rank
        own, tied = (nn.Parameter(torch.zeros(5, 2)) for _ in range(2))
        tied.shared = stage == 1
        optimizer = NeuronZero1Optimizer([own, tied], torch.optim.SGD)
        own.grad, tied.grad = torch.full((5, 2), stage + 1.0), torch.full((5, 2), 3.0)
        optimizer.step()
        return float(optimizer.grad_norm)

    assert run_ranks(train, 4) == [pytest.approx((10 * (1 + 4 + 9)) ** 0.5)] * 4


@pytest.mark.parametrize("frozen_stage", [0, 1])
def test_stage_without_trained_parameters_takes_part_in_the_norm_and_in_skipped_steps(run_ranks, frozen_stage):
    def train():
        initialize_model_parallel(pipeline_model_parallel_size=2)
        is_frozen = get_group("pp").rank == frozen_stage
        parameter = nn.Parameter(torch.zeros(5, 2), requires_grad=not is_frozen)
        optimizer = NeuronZero1Optimizer([parameter], torch.optim.SGD, lr=1.0)
        optimizer.skip_non_finite_steps = True
        norms = []
        for value in (2.0, float("nan")):
            if not is_frozen:
                parameter.grad = torch.full((5, 2), value)
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
        return norms, optimizer.skipped_steps

    expected = [pytest.approx(2 * 10**0.5), pytest.approx(float("nan"), nan_ok=True)]
    assert run_ranks(train, 2) == [(expected, 1)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharding_groups": [[0, 1], [2]]}, r"must name each of the 4 ranks once, in lists of equal length"),
        ({"sharding_groups": [[0, 1]]}, r"sharding_groups=\[\[0, 1\]\] must name each of the 4 ranks once"),
        (
            {"sharding_groups": [[0, 1], [2, 3]]},
            r"sharding_groups=\[\[0, 1\], \[2, 3\]\] are not the replicas of the mesh",
        ),
        ({"sharding_groups": [[0], [1], [2], [3]]}, r"pass \[\[0, 2\], \[1, 3\]\] .* or would drift apart"),
        ({"grad_norm_groups": [[0, 3], [1, 2]]}, r"are not the tensor- or pipeline-parallel groups of the mesh"),
        ({"grad_norm_groups": [[0, 1], [2, 2]]}, r"must name each of the 4 ranks once"),
    ],
)
def test_lists_that_do_not_fit_the_mesh_raise_on_all_ranks(run_ranks, arguments, message):
    def fail():
        initialize_model_parallel(2)
        with pytest.raises(ValueError, match=message):
            make(**arguments)

    run_ranks(fail, 4)


def test_lists_that_differ_between_ranks_raise_on_all(run_ranks):
    def fail():
        initialize_model_parallel()
        groups = [[0, 1]] if get_group("dp").rank else [[0], [1]]
        with pytest.raises(ValueError, match="sharding_groups differs between the ranks"):
            make(sharding_groups=groups)

    run_ranks(fail, 2)


def test_several_ranks_without_a_mesh_raise(run_ranks):
    def fail():
        with pytest.raises(
            RuntimeError, match=r"runs 2 ranks, but there is no mesh.* call nxd_state.initialize_model_parallel"
        ):
            make()

    run_ranks(fail, 2)


def test_one_process_needs_no_mesh_and_takes_lists_of_itself():
    assert make(sharding_groups=[[0]], grad_norm_groups=[[0]]).group.size == 1


def test_sequence_parallel_parameters_that_differ_between_tensor_parallel_ranks_raise_on_all(run_ranks):
    def fail():
        initialize_model_parallel(2)
        parameter = nn.Parameter(torch.ones(5))
        parameter.sequence_parallel_enabled = get_group("tp").rank == 1
        with pytest.raises(ValueError, match="marks in the same order on all tensor-parallel ranks"):
            NeuronZero1Optimizer([parameter], torch.optim.SGD)

    run_ranks(fail, 2)
