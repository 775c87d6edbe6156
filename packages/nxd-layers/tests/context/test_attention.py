"""`context_parallel_attention` on several ranks against a softmax over the whole sequence in one process."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nxd_layers.context import (
    AttentionPlan,
    IntervalMask,
    MaskRule,
    SequenceCut,
    block_attention,
    cheapest_transport,
    context_parallel_attention,
    interval_mask,
)
from nxd_layers.context import plan as plan_module
from nxd_layers.context.block_attention import draw_dropout
from nxd_state import all_gather, all_reduce, get_group, initialize_model_parallel
from torch.utils._pytree import tree_map, tree_map_only

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def dense_mask(case, length, batch):
    """bool `[batch, 1, seq, seq]`, by the definition of each rule."""
    q, k = torch.arange(length)[:, None], torch.arange(length)[None, :]
    rule = case.get("rule", MaskRule())
    origin = torch.zeros(batch, 1, 1, dtype=torch.int64)
    allowed = (k <= q if rule.causal else torch.ones(length, length, dtype=torch.bool)).expand(batch, -1, -1)
    if rule.window is not None:
        allowed = allowed & ((k > q - rule.window) if rule.causal else ((q - k).abs() <= rule.window))
    ids, tokens = documents(case, length, batch), padding(case, length, batch)
    if ids is not None:
        allowed = allowed & (ids[:, :, None] == ids[:, None, :])
        starts = (torch.cat([torch.ones(batch, 1), (ids.diff() != 0)], 1) * torch.arange(length)).cummax(1).values
        origin = starts.to(torch.int64)[:, :, None]
    if tokens is not None:
        allowed = allowed & tokens[:, None, :]
        origin = tokens.int().argmax(1)[:, None, None]
    if rule.chunk is not None:
        origin_k = origin.expand(batch, length, 1).transpose(1, 2)
        same = (q - origin).div(rule.chunk, rounding_mode="floor") == (k - origin_k).div(
            rule.chunk, rounding_mode="floor"
        )
        allowed = allowed & same
    return allowed[:, None]


def documents(case, length, batch):
    if "documents" not in case:
        return None
    generator = torch.Generator().manual_seed(3)
    starts = torch.rand(batch, length, generator=generator) < case["documents"] / length
    return starts.cumsum(1)


def padding(case, length, batch):
    if "padding" not in case:
        return None
    left, right = case["padding"]
    tokens = torch.ones(batch, length, dtype=torch.bool)
    tokens[0, : int(left * length)] = False
    tokens[-1, length - int(right * length) :] = False
    return tokens


def whole_inputs(case, length):
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, size, value_size = case.get("sizes", (4, 2, 8, 8))
    shapes = [(2, heads, length, size), (2, kv_heads, length, size), (2, kv_heads, length, value_size)]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    sinks = torch.randn(heads, dtype=torch.float64, generator=generator) if case.get("sinks") else None
    weight = torch.randn(2, heads, length, value_size, dtype=torch.float64, generator=generator)
    return tensors, sinks, weight


def one_process(case, length):
    """Output and gradients of queries, keys, values and sinks."""
    (q, k, v), sinks, weight = whole_inputs(case, length)
    leaves = [it.requires_grad_() for it in (q, k, v, *([] if sinks is None else [sinks]))]
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if (cap := case.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~dense_mask(case, length, 2), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(2, -1, length, 1)], -1)
    weights = torch.nan_to_num(scores.softmax(-1), 0.0)[..., :length]
    weights = weights * case.get("factors", 1.0)
    output = weights @ v.repeat_interleave(groups, 1)
    (output * weight).sum().backward()
    return output.detach(), [torch.nan_to_num(it.grad) for it in leaves]


def part_of_output(case, length, transport, order):
    """The whole output and gradients, put together from the ranks' parts."""
    group = get_group("cp")
    cut = SequenceCut(length, group.size, order)
    mask = interval_mask(
        length,
        case.get("rule", MaskRule()),
        document_ids=documents(case, length, 2),
        padding_mask=padding(case, length, 2),
    )
    (q, k, v), sinks, weight = whole_inputs(case, length)
    leaves = [cut.part_of(it, group.rank, dim=2).requires_grad_() for it in (q, k, v)]
    if sinks is not None:
        sinks.requires_grad_()
    output = context_parallel_attention(
        *leaves,
        AttentionPlan(mask, cut),
        softcap=case.get("softcap"),
        sinks=sinks,
        dropout=case.get("dropout", 0.0),
        transport=transport,
    )
    (output * cut.part_of(weight, group.rank, dim=2)).sum().backward()
    whole = [cut.whole_of(all_gather(it, group, dim=2), dim=2) for it in (output.detach(), *(x.grad for x in leaves))]
    return whole + ([] if sinks is None else [all_reduce(sinks.grad, group)])


def attend_on_ranks(size, names, length, transports, order="zigzag"):
    initialize_model_parallel(context_parallel_size=size)
    for name in names:
        output, gradients = one_process(CASES[name], length)
        for transport in transports:
            found = part_of_output(CASES[name], length, transport, order)
            for what, got, wanted in zip(("output", "q", "k", "v", "sinks"), found, [output, *gradients], strict=False):
                torch.testing.assert_close(got, wanted, **EXACT, msg=lambda m, t=(name, transport, what): f"{t}: {m}")


CASES = {
    "causal": {},
    "bidirectional": {"rule": MaskRule(causal=False)},
    "window": {"rule": MaskRule(window=5)},
    "window of both sides": {"rule": MaskRule(causal=False, window=3)},
    "chunks": {"rule": MaskRule(chunk=7)},
    "documents": {"documents": 4},
    "documents, window": {"documents": 4, "rule": MaskRule(window=6)},
    "documents, chunks": {"documents": 4, "rule": MaskRule(chunk=4)},
    "documents of encoders": {"documents": 4, "rule": MaskRule(causal=False)},
    "padding": {"padding": (0.3, 0.2)},
    "padding of encoders": {"padding": (0.3, 0.2), "rule": MaskRule(causal=False)},
    "sinks": {"sinks": True},
    "sinks, window": {"sinks": True, "rule": MaskRule(window=4)},
    "softcap": {"softcap": 2.0},
    "softcap, padding": {"softcap": 2.0, "padding": (0.3, 0.2)},
    "one key head": {"sizes": (4, 1, 8, 8)},
    "narrow values": {"sizes": (4, 4, 12, 8)},
    "wide values": {"sizes": (4, 4, 8, 12)},
}


TRANSPORTS = ["ring", "all_gather", "all_to_all"]
FEW = ["causal", "window", "documents, window", "padding of encoders", "sinks, window", "narrow values"]


@pytest.mark.parametrize(
    ("size", "length", "names"),
    [
        (2, 37, list(CASES)),
        (4, 3, FEW),  # ranks without a token of their own
        pytest.param(4, 37, list(CASES), marks=pytest.mark.slow),
        pytest.param(2, 64, list(CASES), marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "shorter than ranks", "4 ranks", "dividing"],
)
def test_attention_over_ranks_equals_one_process(run_ranks, size, length, names):
    run_ranks(attend_on_ranks, size, size, names, length, TRANSPORTS)


@pytest.mark.parametrize("order", ["contiguous", (1, 0, 0, 1, 1, 0)], ids=["neighbours", "three chunks each"])
def test_other_positions_on_each_rank_equal_one_process(run_ranks, order):
    run_ranks(attend_on_ranks, 2, 2, FEW, 20, TRANSPORTS, order)


def attend_without_kernel(names):
    initialize_model_parallel(context_parallel_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "kernel_for", lambda *_, **options: None)
        patch.setattr(block_attention, "_MOST_SCORES", 50)  # so that queries come in parts
        for name in names:
            output, gradients = one_process(CASES[name], 21)
            found = part_of_output(CASES[name], 21, "ring", "zigzag")
            for got, wanted in zip(found, [output, *gradients], strict=True):
                torch.testing.assert_close(got, wanted, **EXACT)


def test_attention_on_devices_without_a_kernel_equals_one_process(run_ranks):
    run_ranks(attend_without_kernel, 2, FEW)


DROPPED = {
    "plain": {},
    "sinks, window": {"sinks": True, "rule": MaskRule(window=9)},
    "one key head": {"sizes": (4, 1, 8, 8)},
}


def attend_with_dropout():
    """At every size, with every transport, in parts of any size: the weights that the definition drops."""
    length, rate = 37, 0.3
    torch.manual_seed(5)
    weights = torch.ones(2, 4, 1, length, length, dtype=torch.float64)
    factors = draw_dropout(rate, 4, torch.device("cpu")).factors(weights)[:, :, 0]
    assert sorted(set(factors.flatten().tolist())) == [0.0, 1 / (1 - rate)]
    for dims in [(), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]:  # overall, and of each row, head, query and key
        torch.testing.assert_close(factors.mean(dims), torch.ones_like(factors.mean(dims)), rtol=0.2, atol=0)
    initialize_model_parallel(context_parallel_size=2)
    for name, case in DROPPED.items():
        output, gradients = one_process(case | {"factors": factors}, length)
        for transport in TRANSPORTS:
            for order in ("zigzag", (1, 0, 0, 1, 1, 0)):
                torch.manual_seed(5 + get_group("cp").rank)  # the first rank's counts
                found = part_of_output(case | {"dropout": rate}, length, transport, order)
                for got, wanted in zip(found, [output, *gradients], strict=True):
                    torch.testing.assert_close(got, wanted, **EXACT, msg=lambda m, t=(name, transport): f"{t}: {m}")


def test_the_same_weights_are_dropped_wherever_they_are_computed(run_ranks):
    run_ranks(attend_with_dropout, 2)
    with pytest.raises(ValueError, match=r"dropout=1\.0 must be at least 0 and below 1"):
        draw_dropout(1.0, 4, torch.device("cpu"))


@st.composite
def cuts(draw):
    size = draw(st.integers(1, 5))
    dealt = st.permutations(list(range(size)) * draw(st.integers(1, 4))).map(tuple)
    return SequenceCut(draw(st.integers(1, 60)), size, draw(st.sampled_from(["zigzag", "contiguous"]) | dealt))


CUTS = cuts()


@given(CUTS)
def test_parts_of_a_cut_are_the_sequence(cut):
    whole = torch.arange(1, cut.length + 1).expand(2, -1)

    parts = [cut.part_of(whole, rank) for rank in range(cut.size)]

    assert torch.equal(cut.whole_of(torch.cat(parts, dim=1)), whole)
    for rank, part in enumerate(parts):
        positions = cut.positions_of(rank)
        assert torch.equal(part[0], torch.where(positions < cut.length, positions + 1, 0))


@st.composite
def masked_sequences(draw):
    """A mask and its definition as a dense one."""
    cut = draw(CUTS)
    rule = MaskRule(draw(st.booleans()), draw(st.none() | st.integers(1, 9)), draw(st.none() | st.integers(1, 9)))
    ids = torch.tensor([draw(st.lists(st.booleans(), min_size=cut.length, max_size=cut.length))]).cumsum(1)
    with_documents = draw(st.booleans())
    q, k = torch.arange(cut.length)[:, None], torch.arange(cut.length)
    allowed = (k <= q) | (not rule.causal)
    if rule.window is not None:
        allowed = allowed & ((k > q - rule.window) if rule.causal else ((q - k).abs() <= rule.window))
    starts = torch.zeros(cut.length, dtype=torch.int64)
    if with_documents:
        allowed = allowed & (ids[0][:, None] == ids[0])
        starts = torch.searchsorted(ids[0].contiguous(), ids[0].contiguous())
    if rule.chunk is not None:
        numbers = (torch.arange(cut.length) - starts) // rule.chunk
        allowed = allowed & (numbers[:, None] == numbers)
    return cut, interval_mask(cut.length, rule, document_ids=ids if with_documents else None), allowed


@given(masked_sequences(), st.integers(1, 4))
def test_blocks_hold_each_allowed_pair_once_and_send_no_more_than_they_use(sequence, rows):
    cut, mask, allowed = sequence
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_MASKED_QUERIES", rows)
        plan = AttentionPlan(mask, cut)
        counts = torch.zeros(cut.filled_length, cut.filled_length, dtype=torch.int64)
        for rank, blocks in enumerate(plan.blocks):
            for block in blocks:
                queries, keys = torch.arange(*block.queries), torch.arange(*block.keys)
                inside = torch.ones(len(queries), len(keys), dtype=torch.bool)
                if block.kind == "masked":
                    inside = plan.mask.allowed(queries, keys)[0, 0]
                elif block.is_causal:
                    assert block.queries == block.keys
                    inside = inside.tril()
                counts[queries[:, None], keys] += inside
                assert cut.rank_of(int(queries[0]) // cut.chunk_length) == rank
        assert torch.equal(counts[: cut.length, : cut.length], allowed.long())
        for rank, needs in enumerate(plan.needs):
            used = [set() for _ in range(cut.num_chunks)]
            for block in plan.blocks[rank]:
                used[block.chunk] |= set(block.keys)
            assert needs == {chunk: (min(it), max(it)) for chunk, it in enumerate(used) if it}


def test_window_is_neither_computed_nor_sent_beyond_its_reach():
    cut = SequenceCut(4096, 4)
    plan = AttentionPlan(interval_mask(4096, MaskRule(window=100)), cut)

    computed = sum((b.queries[1] - b.queries[0]) * (b.keys[1] - b.keys[0]) for blocks in plan.blocks for b in blocks)

    assert computed <= 4096 * (512 + 99)
    assert [plan.sent(1, rank) for rank in (0, 2, 3)] == [[(6, (3997 - 512, 3584))], [(1, (925, 1024))], []]


def test_bad_input_is_refused_by_name(run_ranks):
    with pytest.raises(ValueError, match="padding between tokens, at position 2"):
        interval_mask(4, MaskRule(), padding_mask=torch.tensor([[1, 1, 0, 1]]))
    with pytest.raises(ValueError, match="begins a second time"):
        interval_mask(4, MaskRule(), document_ids=torch.tensor([[0, 1, 0, 0]]))
    with pytest.raises(ValueError, match="unknown order='ring'"):
        SequenceCut(4, 2, "ring")
    with pytest.raises(ValueError, match="has 5 positions along dim 1, but the sequence has 4"):
        SequenceCut(4, 2).part_of(torch.zeros(1, 5), 0)
    run_ranks(refusals, 2)


def attend_to_strided_inputs():
    initialize_model_parallel(context_parallel_size=2)
    plan = AttentionPlan(interval_mask(12, MaskRule()), SequenceCut(12, 2))
    plain = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    strided = plain.transpose(-1, -2).contiguous().transpose(-1, -2)  # as kernels of upstream have them
    for transport in TRANSPORTS:
        expected = context_parallel_attention(plain, plain, plain, plan, transport=transport)
        torch.testing.assert_close(
            context_parallel_attention(strided, strided, strided, plan, transport=transport), expected
        )


def test_masks_of_blocks_are_made_once_for_all_layers_and_both_passes(run_ranks):
    def made():
        initialize_model_parallel()
        ids = torch.arange(1200).div(400, rounding_mode="floor")[None]
        plan = AttentionPlan(interval_mask(1200, MaskRule(), document_ids=ids), SequenceCut(1200, 1))
        query, key, value = (torch.randn(1, 2, 1200, 8, requires_grad=True) for _ in range(3))
        blocks = [block for block in plan.blocks[0] if block.kind == "masked"]
        counts = []
        allowed = IntervalMask.allowed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IntervalMask, "allowed", lambda *args: counts.append(1) or allowed(*args))
            for _ in range(2):
                query = context_parallel_attention(query, key, value, plan, transport="ring")
            query.sum().backward()
        return len(blocks), len(counts)

    ((blocks, counts),) = run_ranks(made, 1)

    assert counts == blocks > 1


def test_plan_is_a_tree_in_which_tensors_may_become_anything():
    plan = AttentionPlan(interval_mask(12, MaskRule()), SequenceCut(12, 2))

    assert tree_map(lambda leaf: None, plan).mask.first is None
    assert tree_map_only(torch.Tensor, lambda tensor: tensor.shape, plan).mask.first == (1, 12)


def test_memory_order_of_inputs_does_not_matter(run_ranks):
    run_ranks(attend_to_strided_inputs, 2)


def refusals():
    initialize_model_parallel(context_parallel_size=2)
    plan = AttentionPlan(interval_mask(8, MaskRule()), SequenceCut(8, 2))
    x = torch.zeros(1, 3, 4, 8)
    with pytest.raises(ValueError, match="cannot split 3 query heads"):
        context_parallel_attention(x, x, x, plan, transport="all_to_all")
    with pytest.raises(ValueError, match="unknown transport='star'"):
        context_parallel_attention(x, x, x, plan, transport="star")
    with pytest.raises(ValueError, match="have 3, 4 and 4 positions"):
        context_parallel_attention(x[:, :, :3], x, x, plan)
    with pytest.raises(ValueError, match="for 1 context-parallel ranks"):
        context_parallel_attention(x, x, x, plan.of_one_rank)


def choose(heads, kv_heads, rule, length):
    initialize_model_parallel(context_parallel_size=2)
    cut = SequenceCut(length, 2)
    q, kv = torch.zeros(1, heads, cut.local_length, 64), torch.zeros(1, kv_heads, cut.local_length, 64)
    return cheapest_transport(q, kv, kv, AttentionPlan(interval_mask(length, rule), cut))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rule", "length", "expected"),
    [
        (16, 2, MaskRule(), 64, "all_gather"),  # few keys and values, and a message of them is short
        (16, 2, MaskRule(), 16384, "ring"),
        (8, 8, MaskRule(causal=False), 64, "all_gather"),
        (2, 2, MaskRule(window=8), 16384, "all_gather"),  # hardly anything travels
    ],
)
def test_cheapest_transport_is_the_one_with_the_fewest_bytes(run_ranks, heads, kv_heads, rule, length, expected):
    assert run_ranks(choose, 2, heads, kv_heads, rule, length) == [expected] * 2
