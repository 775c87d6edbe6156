"""`expert_parallel_forward` on ranks with their own tokens, against one process with all tokens and experts."""

import pytest
import torch
from nxd_layers.experts import dispatch, dispatch_replicated_tokens, expert_parallel_forward, shard_expert_parameter
from nxd_layers.hf.layers import shard_parameter
from nxd_state import (
    all_reduce,
    get_group,
    get_shard_spec,
    get_world_group,
    initialize_model_parallel,
    recv,
    send,
)
from torch import nn

HIDDEN, EXPERTS, CHOSEN = 6, 8, 3
EXACT = {"rtol": 1e-12, "atol": 1e-13}
DISPATCHERS = ("all_to_all", "all_gather")


def tokens_of_ranks(case, ranks):
    """Hidden states, experts and weights of each rank."""
    generator = torch.Generator().manual_seed(0)
    numbers = {"uneven": [5, 0, 9, 1], "one token": [1, 0, 0, 0], "no tokens": [0, 0, 0, 0]}.get(case, [6, 4, 3, 7])
    found = []
    for number in numbers[:ranks]:
        hidden = torch.randn(number, HIDDEN, dtype=torch.float64, generator=generator)
        index = torch.rand(number, EXPERTS, generator=generator).argsort(1)[:, :CHOSEN]
        if case == "all to one expert":
            index = torch.tensor([5, -1, EXPERTS]).expand(number, CHOSEN).contiguous()
        if case == "experts without tokens":
            index = index % 2
        if case == "all experts":
            index = torch.arange(EXPERTS).expand(number, EXPERTS).contiguous()
        if case == "some without an expert":
            index[::2] = EXPERTS
        weights = torch.rand(index.shape, dtype=torch.float64, generator=generator)
        found.append((hidden, index, weights))
    return found


def compute_with(weight):
    """Experts that square their products, so that a token sent to the wrong one is noticed."""

    def compute(hidden, index, weights):
        assert len(hidden), "experts without tokens are not called"
        product = torch.einsum("th,tho->to", hidden, weight[index[:, 0]])
        return (product + product**2) * weights

    return compute


def one_process(hidden, index, weights, experts):
    """`[tokens, hidden]`, expert by expert."""
    total = torch.zeros_like(hidden)
    for slot in range(index.shape[1]):
        for expert in range(EXPERTS):
            rows = (index[:, slot] == expert).nonzero()[:, 0]
            product = hidden[rows] @ experts[expert]
            total = total.index_add(0, rows, (product + product**2) * weights[rows, slot, None])
    return total


def check_against_one_process(forward, tokens, place, dispatcher):
    """Compare outputs and gradients for `tokens[place]` with those of one process that has all tokens and experts."""
    torch.manual_seed(1)
    whole = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN, dtype=torch.float64))
    own = shard_expert_parameter(whole)
    hidden, index, weights = tokens[place]
    hidden, weights = hidden.requires_grad_(), weights.requires_grad_()

    found = forward(
        compute_with(own), hidden, index, weights, num_experts=EXPERTS, trains_experts=True, dispatcher=dispatcher
    )
    (found * torch.arange(1.0, HIDDEN + 1)).sum().backward()

    leaves = [(it.detach().requires_grad_(), routed, w.detach().requires_grad_()) for it, routed, w in tokens]
    expected = [one_process(*it, whole) for it in leaves]
    sum((it * torch.arange(1.0, HIDDEN + 1)).sum() for it in expected).backward()
    torch.testing.assert_close(found, expected[place], **EXACT)
    torch.testing.assert_close(hidden.grad, leaves[place][0].grad, **EXACT)
    torch.testing.assert_close(weights.grad, leaves[place][2].grad, **EXACT)
    own_gradient = torch.zeros_like(own) if own.grad is None else own.grad
    own_gradient = all_reduce(own_gradient, get_group("dp_exp"))
    (piece,) = get_shard_spec(own).pieces
    torch.testing.assert_close(own_gradient, whole.grad[piece.logical.slices], **EXACT)


CASES = [
    "any",
    "uneven",
    "one token",
    "no tokens",
    "all to one expert",
    "experts without tokens",
    "all experts",
    "some without an expert",
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_tokens_of_any_routing_give_outputs_and_gradients_of_one_process(run_ranks, ep, dispatcher):
    def job():
        initialize_model_parallel(1, 1, ep)
        group = get_group("ep")
        for case in CASES:
            check_against_one_process(expert_parallel_forward, tokens_of_ranks(case, ep), group.rank, dispatcher)

    run_ranks(job, ep)


LAYOUTS_OVER_TP = {
    "the same ranks": {"tp": 2, "ep": 2, "ranks": 2},
    "some of them": {"tp": 4, "ep": 2, "ranks": 4},
    "those of two replicas": {"tp": 2, "ep": 4, "ranks": 4},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", LAYOUTS_OVER_TP)
def test_tokens_of_tensor_parallel_ranks_with_other_experts_give_numbers_of_one_process(run_ranks, layout, dispatcher):
    tp, ep, ranks = LAYOUTS_OVER_TP[layout].values()

    def job():
        initialize_model_parallel(tp, 1, ep, expert_tensor_parallel_size=1)
        replica = get_group("dp").rank
        for case in ("any", "one token", "all to one expert", "some without an expert"):
            of_replicas = tokens_of_ranks(case, ranks // tp)
            check_against_one_process(dispatch_replicated_tokens, of_replicas, replica, dispatcher)

    run_ranks(job, ranks)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("trained", ["hidden", "weights", "experts", "nothing"])
def test_backward_of_what_is_trained_needs_no_rank_with_tokens(run_ranks, trained, dispatcher):
    def job():
        initialize_model_parallel(1, 1, 2)
        group = get_group("ep")
        experts = torch.ones(EXPERTS // 2, HIDDEN, HIDDEN, dtype=torch.float64, requires_grad=trained == "experts")
        number = 4 if group.rank == 0 else 0
        hidden = torch.ones(number, HIDDEN, dtype=torch.float64, requires_grad=trained == "hidden")
        weights = torch.ones(number, 1, dtype=torch.float64, requires_grad=trained == "weights")
        index = torch.full((number, 1), 7)  # of the other rank

        output = expert_parallel_forward(
            compute_with(experts),
            hidden,
            index,
            weights,
            num_experts=EXPERTS,
            trains_experts=trained == "experts",
            dispatcher=dispatcher,
        )

        assert output.requires_grad == (trained != "nothing")
        if output.requires_grad:
            output.sum().backward()
        if trained == "experts" and group.rank == 1:
            assert experts.grad[3].any()
            assert not experts.grad[:3].any()
        return output.shape

    assert run_ranks(job, 2) == [(4, HIDDEN), (0, HIDDEN)]


def test_token_with_several_experts_on_a_rank_travels_there_once(run_ranks):
    def job():
        initialize_model_parallel(1, 1, 2)
        sent = []
        original = dispatch.all_to_all_v

        def counting(tensor, group, *, send_counts, receive_counts):
            if tensor.is_floating_point():
                sent.append(sum(it for rank, it in enumerate(send_counts) if rank != group.rank) * tensor[0].numel())
            return original(tensor, group, send_counts=send_counts, receive_counts=receive_counts)

        dispatch.all_to_all_v = counting
        try:
            hidden = torch.ones(10, HIDDEN, dtype=torch.float64, requires_grad=True)
            weights = torch.ones(10, EXPERTS, dtype=torch.float64, requires_grad=True)
            index = torch.arange(EXPERTS).expand(10, EXPERTS)
            experts = torch.ones(EXPERTS // 2, HIDDEN, HIDDEN, dtype=torch.float64)
            output = expert_parallel_forward(
                compute_with(experts),
                hidden,
                index,
                weights,
                num_experts=EXPERTS,
                trains_experts=False,
                dispatcher="all_to_all",
            )
            output.sum().backward()
        finally:
            dispatch.all_to_all_v = original
        return sent

    once = [10 * HIDDEN, 10 * EXPERTS]  # all tokens, and their weights, to the one other rank
    for sent in run_ranks(job, 2):
        assert sent == [*once, 10 * HIDDEN, 10 * HIDDEN, *once]


def test_experts_of_a_parameter_that_is_split_over_tensor_parallel_ranks_say_what_they_hold(run_ranks):
    def job():
        initialize_model_parallel(2, 1, 2)
        whole = torch.arange(4 * 8 * 2.0).view(4, 8, 2)

        module = nn.Module()
        module.weight = nn.Parameter(whole.clone())
        shard_parameter(module, "weight", 1, stride=2)
        own = shard_expert_parameter(module.weight)
        spec = get_shard_spec(own)
        for piece in spec.pieces:
            assert torch.equal(own[piece.local.slices], whole[piece.logical.slices])
        assert own.expert_model_parallel
        assert spec.axis == "ep"
        count = torch.zeros(4, 8, 2)
        for piece in spec.pieces:
            count[piece.logical.slices] += 1
        return all_reduce(count, get_group("pp", "ep", "etp"))

    for count in run_ranks(job, 4):
        assert torch.equal(count, torch.ones(4, 8, 2))


def test_something_else_is_computed_before_the_other_ranks_tell_how_many_tokens_come(run_ranks):
    def job():
        initialize_model_parallel(1, 1, 2)
        group, world = get_group("ep"), get_world_group()
        calls = []

        def meanwhile():
            calls.append("meanwhile")
            if group.rank == 0:
                send(torch.ones(1), world, destination=1)

        if group.rank == 1:  # enters only when the other one, which cannot have its counts, is in `meanwhile`
            recv(torch.zeros(1), world, source=0)
        for dispatcher in DISPATCHERS:
            calls.append(dispatcher)
            hidden, index, weights = tokens_of_ranks("any", 2)[group.rank]
            own = shard_expert_parameter(nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN, dtype=torch.float64)))
            expert_parallel_forward(
                compute_with(own),
                hidden,
                index,
                weights,
                num_experts=EXPERTS,
                trains_experts=True,
                dispatcher=dispatcher,
                meanwhile=meanwhile,
            )
        return calls

    expected = [it for name in DISPATCHERS for it in ([name, "meanwhile"] if name == "all_to_all" else [name])]
    assert run_ranks(job, 2) == [expected] * 2


def test_experts_that_do_not_divide_are_refused(run_ranks):
    def job():
        initialize_model_parallel(1, 1, 2)
        with pytest.raises(ValueError, match=r"3 experts of a parameter .* cannot be split over 2 ranks"):
            shard_expert_parameter(nn.Parameter(torch.ones(3, 2)))
        with pytest.raises(ValueError, match="2 ranks do not divide num_experts=3"):
            expert_parallel_forward(
                compute_with(None),
                torch.ones(1, 2),
                torch.zeros(1, 1, dtype=torch.int64),
                torch.ones(1, 1),
                num_experts=3,
                trains_experts=False,
            )

    run_ranks(job, 2)
