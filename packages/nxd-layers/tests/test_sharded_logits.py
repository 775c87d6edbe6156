"""Choosing from sharded logits against torch on the whole ones in one process."""

import pytest
import torch
from nxd_layers import scatter_to_tensor_model_parallel_region
from nxd_layers.sharded_logits import parallel_argmax, parallel_topk
from torch.nn import functional as F

TP = 4
VOCAB = 24


def own_part(logits, vocab, tp):
    """This rank's columns, the vocabulary padded with values that would win."""
    return scatter_to_tensor_model_parallel_region(F.pad(logits, (0, -vocab % tp), value=1e4))


def lowest_ids(logits, k):
    """Top k of the whole logits: by value, then by id."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


def logits_with_ties(shape, dtype):
    torch.manual_seed(3)
    logits = torch.randint(-2, 3, shape).to(dtype)
    logits[logits == -2] = -torch.inf  # masked tokens tie, too
    return logits


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tp", [1, 2, TP])
def test_argmax_and_topk_equal_torch_with_ties_and_padding(on_tp, tp, dtype):
    def job():
        for vocab in (VOCAB, VOCAB - 1, 5):  # of 5 tokens the last of 4 ranks has none
            for shape in [(), (7,), (2, 3)]:
                for logits in (logits_with_ties((*shape, vocab), dtype), torch.randn(*shape, vocab).to(dtype)):
                    own = own_part(logits, vocab, tp)
                    vocab_size = None if vocab == VOCAB else vocab
                    assert torch.equal(parallel_argmax(own, vocab_size=vocab_size), logits.argmax(dim=-1))
                    for k in {1, 3, vocab - 1, vocab}:  # also more than a rank has
                        values, ids = parallel_topk(own, k, vocab_size=vocab_size)
                        expected_values, expected_ids = lowest_ids(logits, k)
                        assert values.dtype == dtype
                        assert torch.equal(values, expected_values)
                        assert torch.equal(ids, expected_ids)

    on_tp(tp, job)


@pytest.mark.parametrize("tp", [1, 2])
def test_argmax_and_topk_of_non_contiguous_logits_leave_them_unchanged(on_tp, tp):
    def job():
        logits = torch.randn(3, 2, VOCAB).transpose(0, 1)
        own = own_part(logits.transpose(0, 1), VOCAB, tp).transpose(0, 1)
        before = own.clone()
        assert not own.is_contiguous()
        assert torch.equal(parallel_argmax(own, vocab_size=20), logits[..., :20].argmax(dim=-1))
        assert torch.equal(parallel_topk(own, 4, vocab_size=20)[1], lowest_ids(logits[..., :20], 4)[1])
        assert torch.equal(own, before)

    on_tp(tp, job)


def test_argmax_and_topk_give_the_same_on_every_rank_without_gradient(on_tp):
    def job():
        torch.manual_seed(0)
        own = own_part(torch.randn(5, VOCAB), VOCAB, TP).requires_grad_()
        values, ids = parallel_topk(own, 10)
        assert not values.requires_grad
        return parallel_argmax(own), values, ids

    first, *others = on_tp(TP, job)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_argmax_and_topk_communicate_once(on_tp, collectives):
    def job():
        own = torch.randn(5, VOCAB // 2)
        return [collectives(lambda: parallel_argmax(own)), collectives(lambda: parallel_topk(own, 3))]

    assert on_tp(2, job) == [[["c10d::_allgather_base_"]] * 2] * 2


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, r"k=0 is outside 1\.\.24, the size of the vocabulary"),
        ({"k": 25}, r"k=25 is outside 1\.\.24"),
        ({"k": 21, "vocab_size": 20}, r"k=21 is outside 1\.\.20"),
        ({"k": 1, "vocab_size": 25}, r"vocab_size=25 does not fit 24 logits; use 1\.\.24"),
        ({"k": 1, "vocab_size": 0}, "vocab_size=0 does not fit"),
    ],
)
def test_topk_with_wrong_arguments_raises(on_tp, tp, arguments, message):
    def job():
        with pytest.raises(ValueError, match=message):
            parallel_topk(torch.zeros(2, VOCAB // tp), **arguments)

    on_tp(tp, job)


def test_argmax_with_a_vocabulary_of_more_than_the_logits_raises(on_tp):
    def job():
        with pytest.raises(ValueError, match=r"vocab_size=25 does not fit 24 logits"):
            parallel_argmax(torch.zeros(2, VOCAB // 2), vocab_size=25)

    on_tp(2, job)
