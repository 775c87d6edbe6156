"""Gradients, norms, ZeRO-1 states and averages of experts that are split over replicas, against one process.

Two of four ranks have each half of the experts, and a rank's gradient of its experts is the sum of what the tokens of
two ranks give.
"""

import pytest
import torch
from nxd_optim import (
    GradientReducer,
    NeuronZero1Optimizer,
    WeightAverage,
    clip_grad_norm,
    grad_norm,
    gradient_histograms,
)
from nxd_state import Box, ShardPiece, ShardSpec, get_group, initialize_model_parallel, set_shard_spec
from torch import nn

RANKS, EXPERTS = 4, 6
EXACT = {"rtol": 1e-12, "atol": 1e-14}
LAYOUTS = {"over data-parallel ranks": (1, 1), "over tensor-parallel ranks": (2, 1)}  # tp, etp


def whole_model():
    torch.manual_seed(0)
    return torch.randn(5, 3, dtype=torch.float64), torch.randn(EXPERTS, 4, dtype=torch.float64)


def gradients_of_replicas(replicas):
    """What each replica's loss gives the dense weight and all experts."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((5, 3), (EXPERTS, 4))]
        for _ in range(replicas)
    ]


class Rank:
    """This rank's parameters, and the gradients that backward would give them."""

    def __init__(self, tp, etp, ep=2):
        initialize_model_parallel(tp, 1, ep, expert_tensor_parallel_size=etp)
        dense, experts = whole_model()
        self.dp = get_group("dp")
        each = EXPERTS // ep
        self.own = slice(get_group("ep").rank * each, (get_group("ep").rank + 1) * each)
        self.dense, self.experts = nn.Parameter(dense.clone()), nn.Parameter(experts[self.own].clone())
        box, logical = Box((0, 0), (each, 4)), Box((self.own.start, 0), (each, 4))
        set_shard_spec(self.experts, ShardSpec((each, 4), (ShardPiece(box, logical, (EXPERTS, 4)),), axis="ep"))
        self.experts.expert_model_parallel = True

    def backward(self):
        found = gradients_of_replicas(self.dp.size)
        self.dense.grad = found[self.dp.rank][0].clone()
        # Tokens come from the ranks of the expert-parallel group: two replicas, or the two ranks of one.
        replicas = {rank // (RANKS // self.dp.size) for rank in get_group("ep").ranks}
        self.experts.grad = sum(found[replica][1] for replica in replicas)[self.own].clone()

    def expected(self):
        """The mean over the replicas of dense and experts' gradients, whole."""
        found = gradients_of_replicas(self.dp.size)
        return [torch.stack(tensors).mean(0) for tensors in zip(*found, strict=True)]


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reducer_averages_experts_over_their_own_replicas(run_ranks, layout, find_unused_parameters):
    def job():
        rank = Rank(*LAYOUTS[layout])
        reducer = GradientReducer([rank.dense, rank.experts], find_unused_parameters=find_unused_parameters)
        rank.backward()
        reducer.finish()
        dense, experts = rank.expected()
        torch.testing.assert_close(rank.dense.grad, dense, **EXACT)
        torch.testing.assert_close(rank.experts.grad, experts[rank.own], **EXACT)

    run_ranks(job, RANKS)


def test_dense_weights_below_experts_keep_gradients_that_backward_gives_them_last(run_ranks):
    def job():
        initialize_model_parallel(2, 1, 1, expert_tensor_parallel_size=1)  # one replica, whose ranks have whole experts
        dense, experts = (nn.Parameter(it) for it in whole_model())
        experts.expert_model_parallel = True
        reducer = GradientReducer([dense, experts], find_unused_parameters=True)
        with reducer.overlap_backward():
            (dense.sum() * experts.sum()).backward()
        reducer.synchronize()
        has_gradient = dense.grad is not None
        reducer.finish()
        return has_gradient, dense.grad is not None

    assert run_ranks(job, 2) == [(True, True)] * 2


def test_experts_without_tokens_on_one_rank_are_updated_as_the_others(run_ranks):
    def job():
        rank = Rank(1, 1)
        reducer = GradientReducer([rank.dense, rank.experts], find_unused_parameters=True)
        rank.backward()
        if get_group("ep").rank == 0:
            rank.experts.grad = None
        reducer.finish()
        assert rank.experts.grad is not None  # one process has zeros there

    run_ranks(job, RANKS)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, "inf"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_counts_every_expert_once(run_ranks, layout, norm_type):
    def job():
        rank = Rank(*LAYOUTS[layout])
        dense, experts = rank.expected()
        rank.dense.grad, rank.experts.grad = dense.clone(), experts[rank.own].clone()
        flat = torch.cat([dense.flatten(), experts.flatten()])
        expected = torch.linalg.vector_norm(flat, float(norm_type))
        torch.testing.assert_close(grad_norm([rank.dense, rank.experts], norm_type), expected, **EXACT)
        clip_grad_norm([rank.dense, rank.experts], 0.5, norm_type)
        torch.testing.assert_close(rank.experts.grad, experts[rank.own] * (0.5 / (expected + 1e-6)), **EXACT)
        # A stage without experts takes part all the same.
        torch.testing.assert_close(
            grad_norm([rank.dense], norm_type), torch.linalg.vector_norm(rank.dense.grad.flatten(), float(norm_type))
        )

    run_ranks(job, RANKS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero1_steps_like_one_process(run_ranks, layout):
    def job():
        rank = Rank(*LAYOUTS[layout])
        optimizer = NeuronZero1Optimizer([rank.dense, rank.experts], torch.optim.AdamW, lr=0.1, max_norm=0.5)
        plain = [nn.Parameter(it) for it in whole_model()]
        reference = torch.optim.AdamW(plain, lr=0.1)
        for _ in range(2):
            rank.backward()
            optimizer.step()
            for parameter, gradient in zip(plain, rank.expected(), strict=True):
                parameter.grad = gradient.clone()
            norm = nn.utils.clip_grad_norm_(plain, 0.5)
            reference.step()
            torch.testing.assert_close(optimizer.grad_norm, norm, **EXACT)
        torch.testing.assert_close(rank.dense.detach(), plain[0].detach(), **EXACT)
        torch.testing.assert_close(rank.experts.detach(), plain[1].detach()[rank.own], **EXACT)
        wanted = reference.state[plain[1]]["exp_avg"]
        states = [it for it in optimizer.sharded_state() if it.parameter is rank.experts and it.key == "exp_avg"]
        for shard in (shard for state in states for shard in state.shards):
            torch.testing.assert_close(shard.tensor, wanted[shard.box.slices], **EXACT)

    run_ranks(job, RANKS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero1_updates_experts_that_had_no_tokens_as_one_process_does(run_ranks, layout):
    def job():
        rank = Rank(*LAYOUTS[layout])
        optimizer = NeuronZero1Optimizer([rank.dense, rank.experts], torch.optim.AdamW, lr=0.1, grad_clipping=False)
        rank.backward()
        is_idle = get_group("ep").rank == 0
        if is_idle:
            rank.experts.grad = None
        before = rank.experts.detach().clone()
        optimizer.step()
        if is_idle:  # one process has one parameter of all experts, whose gradient is zero there
            torch.testing.assert_close(rank.experts.detach(), before * (1 - 0.1 * 0.01), **EXACT)

    run_ranks(job, RANKS)


def test_average_of_weights_keeps_experts_apart(run_ranks):
    def job():
        rank = Rank(1, 1)
        average = WeightAverage([rank.dense, rank.experts], 0.5)
        before = rank.experts.detach().clone()
        with torch.no_grad():
            rank.experts.add_(2.0)
        average.update()
        with average.applied():
            torch.testing.assert_close(rank.experts.detach(), before + 1.0, **EXACT)

    run_ranks(job, RANKS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_histogram_counts_every_element_of_all_experts_once(run_ranks, layout):
    def job():
        rank = Rank(*LAYOUTS[layout])
        rank.dense.grad, rank.experts.grad = torch.ones_like(rank.dense), torch.ones_like(rank.experts)
        found = gradient_histograms([("dense", rank.dense), ("experts", rank.experts)])
        return {name: it.elements for name, it in found.items()}

    assert run_ranks(job, RANKS) == [{"dense": 15, "experts": 4 * EXPERTS}] * RANKS
