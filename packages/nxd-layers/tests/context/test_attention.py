"""`context_parallel_attention` on several ranks against a softmax over the whole sequence in one process."""

import math

import pytest
import torch
from nxd_layers.context import AttentionPlan, MaskRule, SequenceCut, context_parallel_attention, interval_mask
from nxd_state import all_gather, all_reduce, get_group, initialize_model_parallel

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
        *leaves, AttentionPlan(mask, cut), softcap=case.get("softcap"), sinks=sinks, transport=transport
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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length", [64, 37, 3])
def test_attention_over_ranks_equals_one_process(run_ranks, size, length):
    run_ranks(attend_on_ranks, size, size, list(CASES), length, ["ring", "all_gather", "all_to_all"])
