"""`token_log_probs` and `entropy` against torch's log-softmax over the whole logits, in float64."""

import pytest
import torch
from nxd_layers import entropy, scatter_to_tensor_model_parallel_region, token_log_probs
from torch import fx

VOCAB = 24
IGNORED = -1
SHAPES = [(), (9,), (4, 3)]


def torch_log_probs(logits, tokens):
    ignored = tokens == IGNORED
    chosen = logits.log_softmax(-1).gather(-1, tokens.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(ignored, 0.0)


def torch_entropy(logits):
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def check(own_function, torch_function, logits, *, rtol=1e-10):
    """Compares values and gradients; `logits` are whole and in the dtype under test."""
    whole = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    expected = torch_function(whole)
    weights = torch.linspace(-1.0, 2.0, max(1, expected.numel()), dtype=expected.dtype).view(expected.shape)
    expected.backward(weights)

    own = scatter_to_tensor_model_parallel_region(logits).clone().requires_grad_()
    result = own_function(own)
    result.backward(weights)

    torch.testing.assert_close(result.detach(), expected.detach(), rtol=rtol, atol=rtol)
    own_grad = scatter_to_tensor_model_parallel_region(whole.grad).to(logits.dtype)
    torch.testing.assert_close(own.grad, own_grad, rtol=max(rtol, torch.finfo(logits.dtype).eps), atol=rtol)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_log_probs_of_tokens_equal_torchs(on_tp, tp, shape):
    def job():
        torch.manual_seed(1)
        tokens = torch.randint(0, VOCAB, shape)
        if shape:
            tokens.view(-1)[::3] = IGNORED
        logits = 10 * torch.randn(*shape, VOCAB, dtype=torch.float64)
        check(
            lambda own: token_log_probs(own, tokens, ignore_index=IGNORED),
            lambda whole: torch_log_probs(whole, tokens),
            logits,
        )

    on_tp(tp, job)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_entropy_equals_torchs(on_tp, tp, shape):
    def job():
        torch.manual_seed(1)
        check(entropy, torch_entropy, 10 * torch.randn(*shape, VOCAB, dtype=torch.float64))

    on_tp(tp, job)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_entropy_of_shorter_logits_is_computed_in_float32(on_tp, dtype):
    def job():
        torch.manual_seed(1)
        check(entropy, torch_entropy, (3 * torch.randn(40, VOCAB)).to(dtype), rtol=3e-6)

    on_tp(2, job)


def test_entropy_of_far_away_logits_stays_precise(on_tp):
    def job():
        torch.manual_seed(1)
        check(entropy, torch_entropy, torch.randn(40, VOCAB, dtype=torch.float64) + 1e6, rtol=1e-8)

    on_tp(2, job)


def test_tokens_without_probability_have_no_part_in_entropy_and_gradient(on_tp):
    def job():
        logits = torch.zeros(2, 8, dtype=torch.float64)
        logits[:, 3:] = -torch.inf
        own = scatter_to_tensor_model_parallel_region(logits).clone().requires_grad_()
        result = entropy(own)
        result.sum().backward()
        return result.detach(), own.grad

    for result, grad in on_tp(2, job):
        torch.testing.assert_close(result, torch.full((2,), 3.0, dtype=torch.float64).log())
        torch.testing.assert_close(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("function", ["token_log_probs", "entropy"])
def test_padded_vocabulary_changes_nothing_and_gets_no_gradient(on_tp, function):
    def job():
        torch.manual_seed(1)
        logits = torch.randn(5, VOCAB, dtype=torch.float64)
        tokens = torch.randint(0, VOCAB - 5, (5,))
        own = scatter_to_tensor_model_parallel_region(logits).clone().requires_grad_()
        whole = logits[:, : VOCAB - 5].clone().requires_grad_()
        if function == "entropy":
            pairs = entropy(own, vocab_size=VOCAB - 5), torch_entropy(whole)
        else:
            pairs = token_log_probs(own, tokens, vocab_size=VOCAB - 5), torch_log_probs(whole, tokens)
        for value in pairs:
            value.sum().backward()
        torch.testing.assert_close(pairs[0].detach(), pairs[1].detach())
        padded_grad = torch.nn.functional.pad(whole.grad, (0, 5))
        torch.testing.assert_close(own.grad, scatter_to_tensor_model_parallel_region(padded_grad))

    on_tp(4, job)  # the whole part of the last rank, and one logit of another's, are padding


@pytest.mark.parametrize("vocab_size", [0, VOCAB + 1])
def test_entropy_of_an_impossible_vocabulary_raises(vocab_size):
    with pytest.raises(ValueError, match=rf"vocab_size={vocab_size} does not fit {VOCAB} logits; use 1..{VOCAB}"):
        entropy(torch.zeros(3, VOCAB), vocab_size=vocab_size)


def test_both_are_one_call_in_a_trace():
    class Model(torch.nn.Module):
        def forward(self, logits, tokens):
            return token_log_probs(logits, tokens), entropy(logits)

    called = [node.target for node in fx.symbolic_trace(Model()).graph.nodes if node.op == "call_function"]

    assert called == [token_log_probs, entropy]
