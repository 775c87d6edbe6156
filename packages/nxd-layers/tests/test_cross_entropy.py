"""`parallel_cross_entropy` against `torch.nn.functional.cross_entropy` on the whole logits, in float64."""

import pytest
import torch
from nxd_layers import parallel_cross_entropy, scatter_to_tensor_model_parallel_region
from torch.nn import functional as F

VOCAB = 24
IGNORED = -100


def make_labels(shape, *, ignore_index=IGNORED):
    """Labels of every rank's part of the vocabulary, and some ignored ones."""
    torch.manual_seed(2)
    labels = torch.randint(0, VOCAB, shape)
    labels.view(-1)[::3] = ignore_index
    return labels


def torch_loss(logits, labels, **arguments):
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="none", **arguments).view(
        labels.shape
    )


def check_against_torch(logits, labels, *, rtol=1e-10, **arguments):
    """Compares loss and gradient with torch's; `logits` are whole and in the dtype under test."""
    whole = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    expected = torch_loss(whole, labels, **arguments)
    loss_grad = torch.linspace(0.5, 2.0, labels.numel(), dtype=expected.dtype).view(labels.shape)
    expected.backward(loss_grad)

    own = scatter_to_tensor_model_parallel_region(logits).clone().requires_grad_()
    loss = parallel_cross_entropy(own, labels, **arguments)
    loss.backward(loss_grad)

    own_grad = scatter_to_tensor_model_parallel_region(whole.grad).to(logits.dtype)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=rtol, atol=rtol)
    torch.testing.assert_close(own.grad, own_grad, rtol=max(rtol, torch.finfo(logits.dtype).eps), atol=rtol)


@pytest.mark.pairs
@pytest.mark.parametrize("ignore_index", [IGNORED, 5])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(), (9,), (4, 3), (2, 3, 2)])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_cross_entropy_equals_torch(on_tp, tp, shape, label_smoothing, ignore_index):
    def job():
        labels = make_labels(shape, ignore_index=ignore_index)
        logits = 10 * torch.randn(*shape, VOCAB, dtype=torch.float64)
        check_against_torch(logits, labels, label_smoothing=label_smoothing, ignore_index=ignore_index)

    on_tp(tp, job)


@pytest.mark.pairs
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tp", [1, 2])
def test_cross_entropy_of_shorter_logits_is_computed_in_float32(on_tp, tp, dtype, label_smoothing):
    def job():
        logits = (10 * torch.randn(40, VOCAB)).to(dtype)
        check_against_torch(logits, make_labels((40,)), rtol=2e-6, label_smoothing=label_smoothing)

    on_tp(tp, job)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_cross_entropy_of_far_away_logits_is_as_precise_as_torch(on_tp, offset, label_smoothing):
    def job():
        logits = torch.randn(40, VOCAB) + offset
        check_against_torch(logits, make_labels((40,)), rtol=2e-6, label_smoothing=label_smoothing)

    on_tp(2, job)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cross_entropy_label_smoothing_is_the_same_on_every_rank(on_tp, tp):
    def job():
        own = scatter_to_tensor_model_parallel_region(torch.randn(9, VOCAB))
        return parallel_cross_entropy(own, make_labels((9,)), 0.1)

    losses = on_tp(tp, job)
    assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tp", [1, 2])
def test_cross_entropy_does_not_change_its_logits(on_tp, tp, label_smoothing):
    def job():
        own = scatter_to_tensor_model_parallel_region(torch.randn(9, VOCAB)).requires_grad_()
        before = own.detach().clone()
        parallel_cross_entropy(own, make_labels((9,)), label_smoothing).sum().backward()
        assert torch.equal(own, before)
        assert own._version == 0

    on_tp(tp, job)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tp", [1, 2])
def test_cross_entropy_of_ignored_labels_only_is_zero_without_gradient(on_tp, tp, label_smoothing):
    def job():
        own = torch.randn(4, VOCAB // tp, requires_grad=True)
        loss = parallel_cross_entropy(own, torch.full((4,), IGNORED), label_smoothing)
        loss.sum().backward()
        assert torch.count_nonzero(loss) == 0
        assert torch.count_nonzero(own.grad) == 0

    on_tp(tp, job)


def test_cross_entropy_ignores_a_label_that_is_in_the_vocabulary(on_tp):
    def job():
        own = torch.randn(2, VOCAB // 2, requires_grad=True)
        loss = parallel_cross_entropy(own, torch.tensor([0, 3]), ignore_index=0)
        loss.sum().backward()
        assert loss[0] == 0
        assert loss[1] > 0
        assert torch.count_nonzero(own.grad[0]) == 0
        assert torch.count_nonzero(own.grad[1]) > 0

    on_tp(2, job)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cross_entropy_of_logits_masked_by_infinity_equals_torch(on_tp, tp):
    def job():
        logits = torch.randn(4, VOCAB, dtype=torch.float64)
        logits[:, VOCAB // 2 - 2 :] = -torch.inf  # with padded vocabularies, a rank's whole part can be masked
        check_against_torch(logits, torch.tensor([0, 1, 9, IGNORED]))

    on_tp(tp, job)


def test_cross_entropy_of_non_contiguous_logits_and_gradient_equals_torch(on_tp, assert_same):
    def job():
        logits = torch.randn(VOCAB, 6, dtype=torch.float64)
        labels = make_labels((2, 3))
        whole = logits.clone().requires_grad_()
        torch_loss(whole.t().view(2, 3, VOCAB), labels).sum().backward()

        own = scatter_to_tensor_model_parallel_region(logits, dim=0).requires_grad_()
        parallel_cross_entropy(own.t().unflatten(0, (2, 3)), labels).sum().backward()  # of stride 0
        assert_same(own.grad, scatter_to_tensor_model_parallel_region(whole.grad, dim=0))

    on_tp(2, job)


def test_cross_entropy_backward_twice_gives_the_same_gradient(on_tp):
    def job():
        own = torch.randn(4, VOCAB // 2, requires_grad=True)
        loss = parallel_cross_entropy(own, torch.arange(4), 0.1).sum()
        (first,) = torch.autograd.grad(loss, own, retain_graph=True)
        (second,) = torch.autograd.grad(loss, own)
        assert torch.equal(first, second)

    on_tp(2, job)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
@pytest.mark.parametrize("tp", [1, 2])
def test_cross_entropy_takes_labels_of_other_integer_dtypes(on_tp, tp, dtype):
    def job():
        own = torch.randn(4, VOCAB // tp)
        labels = torch.tensor([0, 23, 7, IGNORED])
        assert torch.equal(parallel_cross_entropy(own, labels.to(dtype)), parallel_cross_entropy(own, labels))

    on_tp(tp, job)


def test_cross_entropy_exchanges_a_few_numbers_per_token(on_tp, operations):
    def job():
        own = torch.randn(4, VOCAB // 2, requires_grad=True)
        losses = []
        forward = operations(lambda: losses.append(parallel_cross_entropy(own, torch.arange(4), 0.1)))
        backward = operations(lambda: losses[0].sum().backward())
        return [[name for name in names if name.startswith("c10d::")] for names in (forward, backward)]

    assert on_tp(2, job) == [[["c10d::allreduce_", "c10d::allreduce_"], []]] * 2


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("labels", "label_smoothing", "message"),
    [
        (torch.tensor([0, 24]), 0.0, r"label 24 is outside the vocabulary 0\.\.23 and is not ignore_index=-100"),
        (torch.tensor([-1, 0]), 0.0, "label -1 is outside the vocabulary"),
        (torch.tensor([0, 1, 2]), 0.0, r"labels of shape \(3,\) do not match logits of shape \(2, .*expected \(2,\)"),
        (torch.tensor([0.0, 1.0]), 0.0, r"labels of dtype torch\.float32 are not token ids"),
        (torch.tensor([0, 1]), 1.5, r"label_smoothing=1\.5 is outside \[0, 1\]"),
        (torch.tensor([0, 1]), -0.1, r"label_smoothing=-0\.1 is outside \[0, 1\]"),
    ],
)
def test_cross_entropy_with_wrong_arguments_raises(on_tp, tp, labels, label_smoothing, message):
    def job():
        with pytest.raises(ValueError, match=message):
            parallel_cross_entropy(torch.zeros(2, VOCAB // tp), labels, label_smoothing)

    on_tp(tp, job)
