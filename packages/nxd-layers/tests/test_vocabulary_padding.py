"""Embedding, head and loss over a vocabulary that does not divide, against plain torch in one process, in float64."""

import pytest
import torch
from nxd_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    parallel_cross_entropy,
    scatter_to_tensor_model_parallel_region,
)
from torch import nn
from torch.nn import functional as F

HIDDEN, TOKENS = 6, 9
VOCABULARIES = [24, 23, 21, 5]  # of 5 tokens the last of 4 ranks has none
IGNORED = -100


def make_labels(vocab):
    torch.manual_seed(2)
    labels = torch.randint(0, vocab, (TOKENS,))
    labels[::4] = IGNORED
    return labels


@pytest.mark.sample(4)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cross_entropy_of_padded_logits_equals_torch_on_the_real_ones(on_tp, assert_same, tp, label_smoothing):
    def job():
        for vocab in VOCABULARIES:
            for filling in (0.0, 1e4, -torch.inf, torch.nan):  # whatever stands at the padding
                labels = make_labels(vocab)
                whole = (10 * torch.randn(TOKENS, vocab, dtype=torch.float64)).requires_grad_()
                padding = -vocab % tp + tp  # a whole column of ranks more than needed
                own = scatter_to_tensor_model_parallel_region(F.pad(whole.detach(), (0, padding), value=filling))
                own.requires_grad_()
                loss_grad = torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64)

                expected = F.cross_entropy(whole, labels, reduction="none", label_smoothing=label_smoothing)
                expected.backward(loss_grad)
                loss = parallel_cross_entropy(own, labels, label_smoothing, vocab_size=vocab)
                loss.backward(loss_grad)

                assert_same(loss, expected)
                assert_same(own.grad, scatter_to_tensor_model_parallel_region(F.pad(whole.grad, (0, padding))))

    on_tp(tp, job)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 4])
def test_cross_entropy_of_padded_short_logits_is_computed_in_float32(on_tp, tp, dtype):
    def job():
        logits = torch.randn(TOKENS, 21).to(dtype)
        own = scatter_to_tensor_model_parallel_region(F.pad(logits, (0, -21 % tp), value=100.0))
        loss = parallel_cross_entropy(own, make_labels(21), 0.1, vocab_size=21)
        expected = F.cross_entropy(logits.float(), make_labels(21), reduction="none", label_smoothing=0.1)
        torch.testing.assert_close(loss, expected)

    on_tp(tp, job)


class LanguageModel(nn.Module):
    def __init__(self, vocab, *, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = ParallelEmbedding(vocab, HIDDEN, dtype=torch.float64, pad=True)
        self.head = ColumnParallelLinear(HIDDEN, vocab, not tied, gather_output=False, dtype=torch.float64, pad=True)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, labels, label_smoothing):
        logits = self.head(torch.tanh(self.embedding(ids)))
        losses = parallel_cross_entropy(logits, labels, label_smoothing, vocab_size=self.head.output_size)
        return losses.sum() / (labels != IGNORED).sum()


class PlainLanguageModel(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.table, self.weight, *self.rest = weights
        self.bias = self.rest[0] if self.rest else None

    def forward(self, ids, labels, label_smoothing):
        logits = F.linear(torch.tanh(F.embedding(ids, self.table)), self.weight, self.bias)
        return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)


@pytest.mark.sample(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_language_model_with_a_padded_vocabulary_trains_as_in_one_process(on_tp, logical, assert_same, tp, tied):
    def job():
        for vocab in VOCABULARIES:
            model = LanguageModel(vocab, tied=tied)
            parameters = [model.embedding.weight, model.head.weight]
            parameters += [] if tied else [model.head.bias]
            leaves = {p: nn.Parameter(logical(p).clone()) for p in parameters}
            plain = PlainLanguageModel([leaves[p] for p in parameters])
            ours, theirs = (
                torch.optim.AdamW(list(dict.fromkeys(learning)), lr=0.05, weight_decay=0.1)
                for learning in (parameters, leaves.values())
            )
            labels = make_labels(vocab)
            ids = labels.clamp(min=0).roll(1)
            for _ in range(3):
                losses = []
                for each, optimizer in ((model, ours), (plain, theirs)):
                    optimizer.zero_grad()
                    loss = each(ids, labels, 0.1)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss)
                assert_same(losses[0], losses[1])
                for parameter, leaf in leaves.items():
                    assert_same(logical(parameter, parameter.grad), leaf.grad)
            for parameter, leaf in leaves.items():
                assert_same(logical(parameter), leaf, rtol=1e-8, atol=1e-10)

    on_tp(tp, job)


@pytest.mark.parametrize("tp", [2, 4])
def test_tied_padded_vocabulary_keeps_its_padding_zero(on_tp, tp):
    def job():
        model = LanguageModel(5, tied=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model.head(torch.tanh(model.embedding(torch.arange(5)))).exp().sum().backward()  # a loss that reads padding
            optimizer.step()
        return model.embedding.weight.detach()

    assert torch.count_nonzero(torch.cat(on_tp(tp, job))[5:]) == 0


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padded_head_that_gathers_gives_the_real_vocabulary(on_tp, logical, assert_same, tp):
    def job():
        head = ColumnParallelLinear(HIDDEN, 21, dtype=torch.float64, pad=True)
        hidden = torch.ones(2, HIDDEN, dtype=torch.float64)
        assert_same(head(hidden), F.linear(hidden, logical(head.weight), logical(head.bias)))

    on_tp(tp, job)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("labels", "vocab_size", "message"),
    [
        (torch.tensor([0, 20]), 20, r"label 20 is outside the vocabulary 0\.\.19"),
        (torch.tensor([0, 1]), 25, r"vocab_size=25 does not fit 24 logits; use 1\.\.24"),
        (torch.tensor([0, 1]), 0, "vocab_size=0 does not fit"),
    ],
)
def test_cross_entropy_with_a_wrong_vocabulary_raises(on_tp, tp, labels, vocab_size, message):
    def job():
        with pytest.raises(ValueError, match=message):
            parallel_cross_entropy(torch.zeros(2, 24 // tp), labels, vocab_size=vocab_size)

    on_tp(tp, job)
