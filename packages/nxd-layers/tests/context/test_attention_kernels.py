"""The kernels of a block of keys: which one serves an input on a GPU, and that each is given what it needs.

There is no GPU here. On fake tensors torch checks arguments and shapes and computes nothing; for the numbers, stand-ins
of the two operations of CUDA compute on the CPU what theirs do, and refuse what theirs refuse.
"""

import logging

import pytest
import torch
from nxd_layers.context.attention_kernels import EfficientAttention, FlashAttention, FlexAttention, Scores
from nxd_layers.context.block_attention import Dropout, attend_block, attend_block_backward
from nxd_testing import operations_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxOutput, flex_attention

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, HEAD, VALUE_HEAD = 2, 4, 2, 10, 14, 12, 6
SCORES = Scores(scale=0.3)


def inputs(keys=KEYS, value_head=VALUE_HEAD, **options):
    """Queries, keys and values."""
    make = torch.empty if options.get("device") == "cuda" else torch.randn
    return (
        make(BATCH, HEADS, QUERIES, HEAD, **options),
        make(BATCH, KV_HEADS, keys, HEAD, **options),
        make(BATCH, KV_HEADS, keys, value_head, **options),
    )


def some_mask(device="cpu"):
    """Some keys for each query, and none for the third."""
    if device == "cuda":
        return torch.empty(BATCH, 1, QUERIES, KEYS, dtype=torch.bool, device=device)
    mask = torch.rand(BATCH, 1, QUERIES, KEYS) < 0.5
    mask[..., 0] = True
    mask[:, :, 2] = False
    return mask


@pytest.mark.parametrize(
    ("dtype", "masked", "chosen"),
    [
        (torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (torch.float16, False, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention"),
        (torch.float32, True, "_scaled_dot_product_efficient_attention"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_attends_with_a_kernel_forward_and_backward(dtype, masked, chosen, causal):
    if masked and causal:
        pytest.skip("a block has one of the two")
    with FakeTensorMode():
        query, key, value = inputs(QUERIES if causal else KEYS, dtype=dtype, device="cuda")
        mask = some_mask("cuda") if masked else None
        output = log_sum = grads = None

        def attend():
            nonlocal output, log_sum, grads
            output, log_sum = attend_block(query, key, value, SCORES, mask=mask, causal=causal)
            grads = attend_block_backward(
                torch.empty_like(output), query, key, value, output, log_sum, SCORES, mask=mask, causal=causal
            )

        seen = set(operations_of(attend))

    assert {name for name in seen if "scaled_dot_product" in name} == {f"aten::{chosen}", f"aten::{chosen}_backward"}
    assert not seen & {"aten::bmm", "aten::mm", "aten::_softmax", "aten::logsumexp"}, "scores in memory"
    assert (output.shape, output.dtype) == ((BATCH, HEADS, QUERIES, VALUE_HEAD), dtype)
    assert (log_sum.shape, log_sum.dtype) == ((BATCH, HEADS, QUERIES), torch.float32)
    assert [grad.shape for grad in grads] == [it.shape for it in (query, key, value)]


def test_slow_way_on_an_accelerator_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING), FakeTensorMode():
        query, key, value = inputs(dtype=torch.float64, device="cuda")
        for _ in range(2):
            attend_block(query, key, value, SCORES, mask=None, causal=False)
    (text,) = [record.message for record in caplog.records if "float64" in record.message]
    assert text == (
        "slow on cuda: attention over a cut sequence has no kernel for torch.float64; use bfloat16 and no dropout"
    )


def test_no_kernel_is_missed_on_the_cpu(caplog):
    attend_block(*inputs(dtype=torch.float64), Scores(0.3, softcap=5.0), mask=None, causal=False)

    assert not caplog.records


def products(query, key, value, scores, mask, causal):
    """Attention written out, with its log-sum-exp."""
    copies = query.shape[1] // key.shape[1]
    key, value = (it.repeat_interleave(copies, dim=1) for it in (key, value))
    raw = query @ key.transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        raw = torch.tanh(raw / scores.softcap) * scores.softcap
    if causal:
        mask = torch.ones(raw.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        raw = raw.masked_fill(~mask, -torch.inf)
    return softmax_product(raw, value)


def softmax_product(raw, value):
    """Values weighed by the softmax of scores, and their log-sum-exp; rows without keys give zero and -inf."""
    log_sum = raw.logsumexp(dim=-1)
    finite = log_sum.masked_fill(log_sum.isinf(), 0.0)
    return (raw - finite.unsqueeze(-1)).exp() @ value, log_sum


def shares_by_products(grad, query, key, value, output, log_sum, scores, mask, causal):
    """Gradients of a block's share, given the output and the log-sum-exp of all keys."""
    leaves = [it.detach().requires_grad_() for it in (query, key, value)]
    own, own_sum = products(*leaves, scores, mask, causal)
    weight = (own_sum.masked_fill(own_sum.isinf(), -1e9) - log_sum).exp()
    share = weight.unsqueeze(-1) * (own - output)
    return torch.autograd.grad((share * grad).sum(), leaves)


def flash(query, key, value, dropout, causal, debug, *, scale):
    """What CUDA's flash attention computes."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert (dropout, debug) == (0.0, False)
    return *products(query, key, value, Scores(scale), None, causal), None, None


def flash_backward(grad, query, key, value, output, log_sum, *rest, scale):
    """Its gradients."""
    assert {it.shape[-1] for it in (grad, query, key, value, output)} == {16}
    assert log_sum.is_contiguous()
    cumulative_q, cumulative_k, longest_q, longest_k, dropout, causal, *_ = rest
    assert (cumulative_q, cumulative_k, dropout) == (None, None, 0.0)
    assert (longest_q, longest_k) == (query.shape[2], key.shape[2])
    return shares_by_products(grad, query, key, value, output, log_sum, Scores(scale), None, causal)


def check_aligned(query, key, value, bias):
    multiple = 16 // query.element_size()
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert all(it.shape[-1] % multiple == 0 and it.stride(-1) == 1 for it in (query, key, value))
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.dtype == query.dtype
        assert bias.stride(-1) == 1
        assert bias.stride(-2) % multiple == 0


def efficient(query, key, value, bias, wants_log_sum, dropout, causal, *, scale):
    """What CUDA's memory-efficient attention computes: a row without keys is nan, and the log-sum-exp is padded."""
    check_aligned(query, key, value, bias)
    assert (wants_log_sum, dropout) == (True, 0.0)
    output, log_sum = products(query, key, value, Scores(scale), None if bias is None else bias == 0, causal)
    output = output.masked_fill(log_sum.isinf().unsqueeze(-1), torch.nan)
    return output, torch.nn.functional.pad(log_sum, (0, -query.shape[2] % 32), value=torch.inf), None, None


def efficient_backward(grad, query, key, value, bias, output, log_sum, *rest, scale):
    """Its gradients."""
    check_aligned(query, key, value, bias)
    assert output.transpose(1, 2).is_contiguous()
    assert log_sum.shape[-1] == 32
    assert (log_sum[..., query.shape[2] :] == torch.inf).all()
    *_, dropout, wanted, causal = rest
    assert (dropout, wanted) == (0.0, [True, True, True, False])
    log_sum = log_sum[..., : query.shape[2]]
    mask = None if bias is None else bias == 0
    grads = shares_by_products(grad, query, key, value, output, log_sum, Scores(scale), mask, causal)
    return *grads, None


def dense_flex(query, key, value, *, score_mod, scale, enable_gqa, return_aux):
    """What flex attention computes, with gradients on the CPU."""
    assert return_aux.lse
    assert enable_gqa
    key, value = (it.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for it in (key, value))
    raw = query @ key.transpose(-1, -2) * scale
    batch, head, row, column = (
        torch.arange(size).view([-1 if dim == own else 1 for dim in range(4)]) for own, size in enumerate(raw.shape)
    )
    output, log_sum = softmax_product(score_mod(raw, batch, head, row, column), value)
    return output, AuxOutput(lse=log_sum)


@pytest.mark.parametrize(
    ("make_kernel", "masked", "causal", "softcap"),
    [
        (FlashAttention, False, False, None),
        (FlashAttention, False, True, None),
        (EfficientAttention, False, False, None),
        (EfficientAttention, False, True, None),
        (EfficientAttention, True, False, None),
        (lambda: FlexAttention(dense_flex), False, False, 5.0),
        (lambda: FlexAttention(dense_flex), False, True, 5.0),
        (lambda: FlexAttention(dense_flex), True, False, 5.0),
    ],
)
def test_kernel_gives_a_blocks_share_of_the_attention_to_all_keys(monkeypatch, make_kernel, masked, causal, softcap):
    torch.manual_seed(0)
    aten = torch.ops.aten
    monkeypatch.setattr(aten, "_scaled_dot_product_flash_attention", flash)
    monkeypatch.setattr(aten, "_scaled_dot_product_flash_attention_backward", flash_backward)
    monkeypatch.setattr(aten, "_scaled_dot_product_efficient_attention", efficient)
    monkeypatch.setattr(aten, "_scaled_dot_product_efficient_attention_backward", efficient_backward)
    kernel, scores = make_kernel(), Scores(0.3, softcap)
    query, key, value = inputs(QUERIES if causal else KEYS, dtype=torch.float64)
    mask = some_mask() if masked else None

    output, log_sum = kernel.forward(query, key, value, scores, mask, causal)
    expected, expected_sum = products(query, key, value, scores, mask, causal)

    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(log_sum, expected_sum)

    # Backward of this block, where other blocks have keys as well.
    grad, of_all = torch.randn_like(output), torch.randn_like(output)
    all_sums = torch.where(expected_sum.isinf(), 0.0, expected_sum) + torch.rand_like(expected_sum)
    found = kernel.backward(grad, query, key, value, of_all, all_sums, scores, mask, causal)
    wanted = shares_of_blocks(grad, query, key, value, of_all, all_sums, scores, mask, causal)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def shares_of_blocks(grad, query, key, value, output, log_sum, scores, mask, causal) -> tuple[Tensor, ...]:
    """The same by `attend_block_backward` on the CPU, from products of matrices."""
    no_dropout = Dropout(0.0, seed=0)
    return attend_block_backward(
        grad, query, key, value, output, log_sum, scores, mask=mask, causal=causal, dropout=no_dropout
    )


@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_computes_the_scores_that_are_defined(causal):
    torch.manual_seed(0)
    scores = Scores(0.3, softcap=2.0)
    query, key, value = inputs(QUERIES if causal else KEYS, HEAD, dtype=torch.float32)
    mask = None if causal else some_mask()

    with torch.no_grad():
        output, log_sum = FlexAttention(flex_attention).forward(query, key, value, scores, mask, causal)
    expected, expected_sum = products(query, key, value, scores, mask, causal)

    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(log_sum, expected_sum)
