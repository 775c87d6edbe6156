"""The mixture-of-experts layer at every layout, against a loop over tokens in one process, in float64."""

import pytest
import torch
from nxd_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from nxd_layers.experts import (
    BalanceConfig,
    ExpertMLPs,
    GroupLimitedRouter,
    MoE,
    RouterBalance,
    RouterLayer,
    RouterSinkhorn,
    RouterTopK,
    load_balancing_loss,
)
from nxd_state import (
    all_reduce,
    destroy_model_parallel,
    get_group,
    get_shard_spec,
    initialize_model_parallel,
    static_shapes,
)
from nxd_state.parameter_marks import MatrixLayout, get_matrix_layout
from torch import nn
from torch.nn import functional as F

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 8, 12
SEQ, BATCH = 6, 4
EXACT = {"rtol": 1e-11, "atol": 1e-12}
LAYOUTS = {  # ranks, tp, ep, etp
    "one rank": (1, 1, 1, 1),
    "TP 2": (2, 2, 1, 2),
    "EP 2": (2, 1, 2, 1),
    "EP 2 over TP 2": (2, 2, 2, 1),
    "EP 2 x TP 2": (4, 2, 2, 2),
}


def bounded_glu(gate, up):
    return gate.clamp(max=0.2) * torch.sigmoid(1.7 * gate) * (up + 1.0)


def make_layer(
    *, sequence_parallel=False, glu=True, capacity_factor=None, normalize=True, shared=False, activation=None
):
    torch.manual_seed(3)
    router = RouterTopK(EXPERTS, TOP_K, HIDDEN, sequence_parallel_enabled=sequence_parallel, dtype=torch.float64)
    mlps = ExpertMLPs(
        EXPERTS,
        TOP_K,
        HIDDEN,
        INNER,
        glu_mlp=glu,
        capacity_factor=capacity_factor,
        normalize_top_k_affinities=normalize,
        gated_activation=activation,
        dtype=torch.float64,
    )
    into = ColumnParallelLinear(HIDDEN, 10, bias=False, gather_output=False, dtype=torch.float64)
    out = RowParallelLinear(10, HIDDEN, bias=False, input_is_parallel=True, dtype=torch.float64)
    shared_experts = nn.Sequential(into, nn.Tanh(), out) if shared else None
    return MoE(
        router,
        mlps,
        shared_experts=shared_experts,
        sequence_parallel_enabled=sequence_parallel,
        return_router_logits=True,
    )


def by_hand(hidden, weights, *, glu, capacity_factor, normalize, shared=False, activation=None):
    """Token by token: outputs, and logits."""
    logits = hidden.reshape(-1, HIDDEN) @ weights["router.linear_router.weight"].t()
    affinities = logits.softmax(-1)
    chosen = logits.topk(TOP_K).indices
    limit = len(chosen) if capacity_factor is None else -int(-len(hidden) * TOP_K * capacity_factor // EXPERTS)
    rooms = [[limit] * EXPERTS for _ in range(hidden.shape[1])]  # of each sequence
    outputs = []
    for place, (token, experts, affinity) in enumerate(
        zip(hidden.reshape(-1, HIDDEN), chosen.tolist(), affinities, strict=True)
    ):
        room = rooms[place % hidden.shape[1]]
        taken = [it for it in experts if room[it] > 0]
        for it in taken:
            room[it] -= 1
        total = sum(affinity[it] for it in taken) if normalize else 1.0
        output = torch.zeros_like(token)
        for it in taken:
            if glu:
                gate, up = (token @ weights["expert_mlps.mlp_op.gate_up_proj.weight"][it]).chunk(2)
                inner = activation(gate, up) if activation else F.silu(gate) * up
            else:
                inner = F.silu(token @ weights["expert_mlps.mlp_op.up_proj.weight"][it])
            output = output + affinity[it] / total * (inner @ weights["expert_mlps.mlp_op.down_proj.weight"][it])
        if shared:
            inner = torch.tanh(weights["shared_experts.0.weight"] @ token)
            output = output + weights["shared_experts.2.weight"] @ inner
        outputs.append(output)
    return torch.stack(outputs).view(hidden.shape), logits


def loss_of(output, logits):
    return (output * torch.arange(1.0, HIDDEN + 1)).mean() + load_balancing_loss(logits, EXPERTS, TOP_K)


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"glu": False, "normalize": False},
        {"capacity_factor": 0.75},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "shared": True},
        {"shared": True, "activation": bounded_glu},
    ],
    ids=["gated", "plain", "capacity", "split sequence", "shared, split sequence", "shared, other activation"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_computes_what_a_loop_over_tokens_does(run_ranks, layout, options):
    ranks, tp, ep, etp = LAYOUTS[layout]

    def job():
        initialize_model_parallel(1)
        settings = {"glu": True, "capacity_factor": None, "normalize": True} | options
        sequence_parallel = settings.pop("sequence_parallel", False)
        whole = {name: it.detach().clone().requires_grad_() for name, it in make_layer(**settings).named_parameters()}
        destroy_model_parallel()
        initialize_model_parallel(tp, 1, ep, expert_tensor_parallel_size=etp)
        dp, tp_group = get_group("dp"), get_group("tp")
        layer = make_layer(sequence_parallel=sequence_parallel, **settings)
        generator = torch.Generator().manual_seed(5)
        replicas = [torch.randn(SEQ, BATCH, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(dp.size)]

        inputs = [it.clone().requires_grad_() for it in replicas]
        expected = [by_hand(it, whole, **settings) for it in inputs]
        sum(loss_of(*it) for it in expected).backward()

        mine = replicas[dp.rank].clone().requires_grad_()
        given = scatter_to_sequence_parallel_region(mine) if sequence_parallel else mine
        output, logits = layer(given)
        if sequence_parallel:
            output = gather_from_sequence_parallel_region(output, 0, to_model_parallel=False)
        loss_of(output, logits).backward()

        torch.testing.assert_close(output, expected[dp.rank][0], **EXACT)
        torch.testing.assert_close(logits, expected[dp.rank][1], **EXACT)
        torch.testing.assert_close(mine.grad, inputs[dp.rank].grad, **EXACT)
        for name, parameter in layer.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            is_expert = getattr(parameter, "expert_model_parallel", False)
            gradient = all_reduce(gradient, get_group("dp_exp") if is_expert else dp)
            if getattr(parameter, "sequence_parallel_enabled", False):
                gradient = all_reduce(gradient, tp_group)
            spec = get_shard_spec(parameter)
            if spec is None:
                torch.testing.assert_close(gradient, whole[name].grad, **EXACT)
            for piece in spec.pieces if spec is not None else ():
                wanted = whole[name].grad[piece.logical.slices]
                torch.testing.assert_close(gradient[piece.local.slices], wanted, **EXACT)

    run_ranks(job, ranks)


def dropped_in(hidden, sequence_dimension=0):
    """`[batch, seq]`: the tokens that no expert takes, which so come out as zeros."""
    torch.manual_seed(3)
    router = RouterTopK(EXPERTS, 1, HIDDEN, dtype=torch.float64)
    mlps = ExpertMLPs(EXPERTS, 1, HIDDEN, INNER, capacity_factor=0.75, dtype=torch.float64)
    outputs = MoE(router, mlps, sequence_dimension=sequence_dimension)(hidden)[0]
    return (outputs == 0).all(dim=-1).movedim(sequence_dimension, 1)


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (2, 1), (4, 2)])
def test_dropped_tokens_are_the_same_at_every_number_of_replicas_and_microbatches(run_ranks, ranks, ep):
    hidden = torch.randn(SEQ, 8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    expected = dropped_in(hidden)

    def job():
        initialize_model_parallel(1, 1, ep)
        replicas = get_group("dp")
        own = hidden.chunk(replicas.size, dim=1)[replicas.rank]
        in_two = torch.cat([dropped_in(microbatch) for microbatch in own.chunk(2, dim=1)])
        return dropped_in(own), in_two, dropped_in(own.transpose(0, 1), 1)

    found = run_ranks(job, ranks)
    for of_ranks in zip(*found, strict=True):
        assert torch.equal(torch.cat(of_ranks), expected)
    assert 0 < expected.sum() < expected.numel()


def test_tokens_of_cut_sequences_are_not_dropped_but_refused(run_ranks):
    def job():
        initialize_model_parallel(1, context_parallel_size=2)
        with pytest.raises(ValueError, match=r"capacity_factor=0.75 drops .* cut over 2 context-parallel ranks"):
            dropped_in(torch.ones(SEQ, 1, HIDDEN, dtype=torch.float64))

    run_ranks(job, 2)


def test_sinkhorn_router_gives_experts_more_equal_numbers_of_tokens_in_training():
    torch.manual_seed(0)
    router = RouterSinkhorn(4, 1, 8)
    with torch.no_grad():
        router.linear_router.weight[0] += 1.0  # all tokens would go there
    tokens = torch.randn(64, 2, 8) + 1.0

    trained = router(tokens)[2].flatten().bincount(minlength=4)
    router.eval()
    plain = router(tokens)[2].flatten().bincount(minlength=4)

    assert plain[0] > 100
    assert trained.max() < 60
    assert trained.min() > 10


def test_group_limited_router_takes_the_best_experts_of_the_best_groups():
    torch.manual_seed(0)
    router = GroupLimitedRouter(8, 2, HIDDEN, n_group=4, topk_group=2, dtype=torch.float64)
    router.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    tokens = torch.randn(5, 3, HIDDEN, dtype=torch.float64)

    logits, affinities, index = router(tokens)

    scores = logits.sigmoid() + router.e_score_correction_bias
    for token, chosen in zip(scores.tolist(), index.tolist(), strict=True):
        groups = sorted(range(4), key=lambda group: -sum(token[2 * group : 2 * group + 2]))[:2]
        allowed = [expert for group in groups for expert in (2 * group, 2 * group + 1)]
        assert chosen == sorted(allowed, key=lambda expert: -token[expert])[:2]
    torch.testing.assert_close(affinities, logits.sigmoid())
    with pytest.raises(ValueError, match="n_group=3 must divide num_experts=8"):
        GroupLimitedRouter(8, 2, HIDDEN, n_group=3, topk_group=2)
    with pytest.raises(ValueError, match="topk_group=1 of n_group=4 groups have fewer than top_k=3 experts"):
        GroupLimitedRouter(8, 3, HIDDEN, n_group=4, topk_group=1)


def test_step_draws_the_random_numbers_that_the_forwards_counted_before_it_drew():
    balance = RouterBalance({}, {"router": RouterLayer(4, 2)}, BalanceConfig(aux_loss_coef=1.0))
    drawn = []

    balance.train(
        lambda: drawn.append(torch.rand(3)),
        count=lambda: drawn.append(torch.rand(3)),
        num_microbatches=2,
        num_sequences=1,
    )

    assert torch.equal(*drawn)


def test_padding_among_tokens_in_an_unknown_order_is_refused():
    router = RouterTopK(4, 2, HIDDEN)
    balance = RouterBalance({"router": router}, {"router": RouterLayer(4, 2, keeps_order=False)}, BalanceConfig())
    masks = torch.ones(2, 3, dtype=torch.bool)

    def count(masks):
        tokens = torch.randn(3, 2, HIDDEN)
        balance.train(lambda: router(tokens), count=None, num_microbatches=1, num_sequences=2, tokens=[masks])

    count(masks)
    assert balance.statistics.tokens_per_expert.sum() == 12
    masks[1, 2] = False
    with pytest.raises(ValueError, match="RouterTopK gets 6 tokens, but it is unknown which of them are padding"):
        count(masks)


def test_token_that_would_overflow_in_an_expert_of_others_stays_a_number_in_float16():
    mlps = ExpertMLPs(2, 1, HIDDEN, INNER, dtype=torch.float16)
    with torch.no_grad():
        for parameter in mlps.parameters():
            parameter.fill_(0.1)
            parameter[1] = 40.0
    tokens = torch.full((1, HIDDEN), 10.0, dtype=torch.float16, requires_grad=True)
    affinities, index = torch.tensor([[1.0, 0.0]], dtype=torch.float16), torch.tensor([[0]])
    expected = mlps(tokens, affinities, index).detach()

    with static_shapes():
        found = mlps(tokens, affinities, index)
        found.sum().backward()

    torch.testing.assert_close(found.detach(), expected)
    assert tokens.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in mlps.parameters())


def test_weights_of_experts_are_marked_with_their_matrices():
    gated, plain = (ExpertMLPs(EXPERTS, 1, HIDDEN, INNER, glu_mlp=it).mlp_op for it in (True, False))

    assert get_matrix_layout(gated.gate_up_proj.weight) == MatrixLayout(-1, (INNER, INNER))
    assert get_matrix_layout(gated.down_proj.weight) == get_matrix_layout(plain.up_proj.weight) == MatrixLayout(-1)


def test_balanced_load_has_the_loss_one():
    logits = torch.zeros(8, 4)
    logits[torch.arange(8), torch.arange(8) % 4] = 1e-9

    assert load_balancing_loss(logits, 4, 1).item() == pytest.approx(1.0)
    assert load_balancing_loss(logits * 0 + torch.tensor([9.0, 0, 0, 0]), 4, 1).item() > 3.9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RouterTopK(4, 5, 8), "top_k=5 must be 1 to num_experts=4"),
        (lambda: RouterTopK(4, 1, 8, act_fn="relu"), "unknown act_fn='relu'"),
        (lambda: RouterSinkhorn(4, 2, 8), "top_k=2 must be 1"),
        (lambda: ExpertMLPs(4, 1, 8, 8, hidden_act="cube"), "unknown hidden_act='cube'"),
        (lambda: ExpertMLPs(4, 1, 8, 8, capacity_factor=0), "capacity_factor=0 must be above 0"),
        (lambda: MoE(RouterTopK(4, 1, 8), ExpertMLPs(4, 2, 8, 8)), "top_k is 1 in the router and 2 in the experts"),
        (
            lambda: MoE(RouterTopK(4, 1, 8, sequence_parallel_enabled=True), ExpertMLPs(4, 1, 8, 8)),
            "pass sequence_parallel_enabled=True here, too",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("capacity_factor", [None, 0.75])
def test_tokens_without_a_batch_dim_are_one_sequence(capacity_factor):
    layer = make_layer(capacity_factor=capacity_factor)
    tokens = torch.randn(SEQ, HIDDEN, dtype=torch.float64)

    assert torch.equal(layer(tokens)[0], layer(tokens.unsqueeze(1))[0].squeeze(1))


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 4)])
def test_experts_split_over_some_of_the_tensor_parallel_ranks_are_refused(run_ranks, ranks, tp):
    def job():
        initialize_model_parallel(tp, expert_tensor_parallel_size=2)
        with pytest.raises(ValueError, match=f"expert_tensor_parallel_size=2 must be 1 or tensor_parallel_size={tp}"):
            make_layer()

    run_ranks(job, ranks)
