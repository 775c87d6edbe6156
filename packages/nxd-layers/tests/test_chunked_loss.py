"""`linear_cross_entropy` against the head followed by `parallel_cross_entropy`, and against torch in one process."""

import pytest
import torch
from nxd_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    parallel_cross_entropy,
    scatter_to_sequence_parallel_region,
)
from nxd_layers.activation_checkpoint import apply_activation_checkpointing, matmul_outputs
from nxd_layers.chunked_loss import linear_cross_entropy
from nxd_state import initialize_model_parallel
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SEQUENCE, BATCH, HIDDEN, VOCAB = 8, 3, 6, 20
IGNORED = -100


def make_head(vocab=VOCAB, *, bias=True, dtype=torch.float64, **arguments):
    torch.manual_seed(0)
    return ColumnParallelLinear(HIDDEN, vocab, bias, gather_output=False, dtype=dtype, pad=True, **arguments)


def make_tokens(vocab=VOCAB, dtype=torch.float64):
    torch.manual_seed(1)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=dtype)
    labels = torch.randint(0, vocab, (SEQUENCE, BATCH))
    labels[::3, 0] = IGNORED
    return hidden, labels


def unchunked(hidden, head, labels, label_smoothing=0.0):
    losses = parallel_cross_entropy(head(hidden), labels, label_smoothing, vocab_size=head.output_size)
    return losses.sum() / (labels != IGNORED).sum()


def own_tokens(hidden, head):
    """The input that the head expects, as a leaf."""
    if head.sequence_parallel_enabled:
        hidden = scatter_to_sequence_parallel_region(hidden, head.sequence_dimension)
    return hidden.clone().requires_grad_()


def loss_and_grads(loss_of, hidden, head):
    """Loss, and gradients of input, weight and bias, with an upstream gradient other than one."""
    own = own_tokens(hidden, head)
    head.zero_grad()
    loss = loss_of(own)
    (3 * loss).backward()
    return [loss.detach(), own.grad, *(parameter.grad for parameter in head.parameters())]


def assert_all_close(actual, expected, rtol=1e-12):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-13)


@pytest.mark.sample(3)
@pytest.mark.parametrize("vocab", [VOCAB, VOCAB - 1, 5])  # of 5 tokens the last of 4 ranks has none
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_chunked_loss_equals_torch_and_the_unchunked_loss(on_tp, logical, tp, vocab):
    def job():
        hidden, labels = make_tokens(vocab)
        for bias in (False, True):
            for sequence_dim in (None, 0):
                head = make_head(vocab, bias=bias, sequence_parallel_enabled=sequence_dim is not None)
                whole = [logical(parameter).clone().requires_grad_() for parameter in head.parameters()]
                for smoothing in (0.0, 0.1):
                    logits = F.linear(hidden, *whole).flatten(0, 1)
                    expected = F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing)
                    grads = torch.autograd.grad(3 * expected, whole)
                    direct = loss_and_grads(lambda own: unchunked(own, head, labels, smoothing), hidden, head)  # noqa: B023
                    for size in (5, 24, 1000):
                        chunked = loss_and_grads(
                            lambda own: linear_cross_entropy(own, head, labels, smoothing, chunk_size=size),  # noqa: B023
                            hidden,
                            head,
                        )
                        assert_all_close(chunked, direct)
                        assert_all_close(chunked[:1], [expected.detach()])
                        found = [logical(parameter, parameter.grad) for parameter in head.parameters()]
                        assert_all_close(found, grads)

    on_tp(tp, job)


@pytest.mark.parametrize("sequence_dim", [1, -2])
def test_chunked_loss_of_a_sequence_on_another_dim_equals_the_unchunked(on_tp, sequence_dim):
    def job():
        hidden, labels = make_tokens()
        hidden, labels = hidden.transpose(0, 1).contiguous(), labels.t()
        head = make_head(sequence_parallel_enabled=True, sequence_dimension=sequence_dim)
        chunked = loss_and_grads(lambda own: linear_cross_entropy(own, head, labels, chunk_size=7), hidden, head)
        assert_all_close(chunked, loss_and_grads(lambda own: unchunked(own, head, labels), hidden, head))

    on_tp(2, job)


def test_chunked_loss_with_a_tied_padded_weight_equals_one_process(on_tp, logical):
    def job():
        vocab = VOCAB - 1
        _, labels = make_tokens(vocab)
        ids = labels.clamp(min=0).roll(1, 0)
        embedding = ParallelEmbedding(vocab, HIDDEN, dtype=torch.float64, pad=True)
        head = make_head(vocab, bias=False)
        head.weight = embedding.weight
        linear_cross_entropy(embedding(ids), head, labels, chunk_size=7).backward()

        table = logical(embedding.weight).clone().requires_grad_()
        logits = F.linear(F.embedding(ids, table), table)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        assert_all_close([logical(embedding.weight, embedding.weight.grad)], [table.grad])

    on_tp(4, job)


@pytest.mark.parametrize("tp", [1, 2])
def test_chunked_loss_needs_gradients_only_of_what_learns(on_tp, operations, tp):
    def job():
        hidden, labels = make_tokens()
        head = make_head()
        products = []
        for learning in [(), ("hidden",), ("weight",), ("bias",), ("weight", "bias")]:
            expected = loss_and_grads(lambda own: unchunked(own, head, labels), hidden, head)[1:]
            head.zero_grad()
            own = own_tokens(hidden, head)
            tensors = {"hidden": own, "weight": head.weight, "bias": head.bias}
            for name, tensor in tensors.items():
                tensor.grad = None
                tensor.requires_grad_(name in learning)
            names = operations(lambda: products.append(linear_cross_entropy(own, head, labels, chunk_size=24)))  # noqa: B023
            assert names.count("aten::mm") + names.count("aten::addmm_") == ("hidden" in learning) + (
                "weight" in learning
            )
            if learning:
                (3 * products[-1]).backward()
            for (name, tensor), wanted in zip(tensors.items(), expected, strict=True):
                if name in learning:
                    assert_all_close([tensor.grad], [wanted])
                else:
                    assert tensor.grad is None
                tensor.requires_grad_()

    on_tp(tp, job)


@pytest.mark.parametrize("tp", [1, 2])
def test_chunked_loss_without_gradients_makes_none(on_tp, operations, tp):
    def job():
        hidden, labels = make_tokens()
        head = make_head()
        with torch.no_grad():
            names = operations(lambda: linear_cross_entropy(hidden, head, labels, chunk_size=7))
            assert_all_close(
                [linear_cross_entropy(hidden, head, labels, chunk_size=7)], [unchunked(hidden, head, labels)]
            )
        assert not {"aten::mm", "aten::addmm_"} & set(names)

    on_tp(tp, job)


def test_chunked_loss_communicates_the_input_once_in_each_direction(on_tp, collectives):
    def job():
        hidden, labels = make_tokens()
        found = []
        for sequence_parallel in (False, True):
            head = make_head(sequence_parallel_enabled=sequence_parallel)
            own = own_tokens(hidden, head)
            found.append(collectives(lambda: linear_cross_entropy(own, head, labels, chunk_size=12).backward()))  # noqa: B023
        return found

    per_chunk = ["c10d::allreduce_", "c10d::allreduce_"]
    assert (
        on_tp(2, job)
        == [
            [
                [*per_chunk, *per_chunk, "c10d::allreduce_"],
                ["c10d::_allgather_base_", *per_chunk, *per_chunk, "c10d::alltoall_base_"],
            ]
        ]
        * 2
    )


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_chunked_loss_in_short_dtypes_is_no_less_exact_than_the_unchunked(on_tp, tp, autocast, dtype):
    def job():
        hidden, labels = make_tokens(dtype=torch.float32 if autocast else dtype)
        head = make_head(dtype=hidden.dtype)
        exact_head = make_head(dtype=torch.float64)
        with torch.no_grad():
            for exact, parameter in zip(exact_head.parameters(), head.parameters(), strict=True):
                exact.copy_(parameter)
        expected = loss_and_grads(lambda own: unchunked(own, exact_head, labels), hidden.double(), exact_head)
        with torch.autocast("cpu", dtype, enabled=autocast):
            direct = loss_and_grads(lambda own: unchunked(own, head, labels), hidden, head)
            chunked = loss_and_grads(lambda own: linear_cross_entropy(own, head, labels, chunk_size=7), hidden, head)
        eps = torch.finfo(dtype).eps
        for found, plain, exact in zip(chunked, direct, expected, strict=True):
            assert found.dtype == plain.dtype
            error, plain_error = ((x.double() - exact).norm() / exact.norm() for x in (found, plain))
            assert error <= 1.5 * plain_error + 0.5 * eps

    on_tp(tp, job)


@pytest.mark.parametrize("tp", [1, 2])
def test_chunked_loss_sum_and_all_ignored(on_tp, tp):
    def job():
        hidden, labels = make_tokens()
        head = make_head()
        count = (labels != IGNORED).sum()
        mean = linear_cross_entropy(hidden, head, labels, chunk_size=7)
        total = linear_cross_entropy(hidden, head, labels, chunk_size=7, reduction="sum")
        assert_all_close([total / count], [mean])
        results = loss_and_grads(
            lambda own: linear_cross_entropy(own, head, torch.full_like(labels, IGNORED)), hidden, head
        )
        assert all(torch.count_nonzero(result) == 0 for result in results)

    on_tp(tp, job)


def test_chunked_loss_under_checkpoint_and_compile_equals_the_plain(on_tp):
    def job():
        hidden, labels = make_tokens()
        head = make_head()

        def loss_of(own):
            return linear_cross_entropy(own, head, labels, chunk_size=12)

        expected = loss_and_grads(loss_of, hidden, head)
        assert_all_close(
            loss_and_grads(lambda own: checkpoint(loss_of, own, use_reentrant=False), hidden, head), expected
        )
        torch._dynamo.reset()
        compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
        if torch.__version__.startswith("2.11."):
            with pytest.raises(Exception, match=r"torch 2\.11 compiles linear_cross_entropy to wrong gradients"):
                compiled(hidden)
        else:
            assert_all_close(loss_and_grads(compiled, hidden, head), expected)

    on_tp(2, job)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_chunked_loss_in_a_module_that_keeps_matmuls_keeps_no_products_of_its_own(on_tp, bias, dtype):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.first = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
            self.head = make_head(bias=bias, dtype=dtype)

        def forward(self, hidden, labels):
            hidden = F.silu(self.first(hidden))
            return linear_cross_entropy(hidden, self.head, labels, chunk_size=4) * hidden.sin().sum()

    def job():
        results, asked = [], []

        def keep(operation):
            asked.append(operation)
            return matmul_outputs(operation)

        for is_checkpointed in (False, True):
            model = Model()
            if is_checkpointed:
                assert apply_activation_checkpointing(model, Model, keep=keep) == [""]
            hidden, labels = make_tokens(dtype=dtype)
            loss = model(hidden.requires_grad_(), labels)
            kept = [operation for operation in asked if matmul_outputs(operation)]
            loss.backward()
            results.append([loss.detach(), hidden.grad, *(parameter.grad for parameter in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        return len(kept)

    assert on_tp(2, job) == [1, 1]  # that of `first`


def test_chunked_loss_second_backward_raises_and_says_what_to_do():
    hidden, labels = make_tokens()
    loss = linear_cross_entropy(hidden, make_head(), labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="released by its first backward; call it again"):
        loss.backward()


def test_chunked_loss_accumulates_into_existing_gradients():
    hidden, labels = make_tokens()
    head = make_head()
    for _ in range(2):
        linear_cross_entropy(hidden, head, labels, chunk_size=7).backward()
    twice = head.weight.grad.clone()
    head.zero_grad()
    linear_cross_entropy(hidden, head, labels, chunk_size=7).backward()
    assert_all_close([twice], [2 * head.weight.grad])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduction": "none"}, "reduction='none' is unknown; use one of mean, sum"),
        ({"chunk_size": 0}, "chunk_size=0 must be positive"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0 is outside"),
        ({"labels": torch.full((SEQUENCE, BATCH), VOCAB)}, r"label 20 is outside the vocabulary 0\.\.19"),
        (
            {"labels": torch.zeros(SEQUENCE, dtype=torch.int64)},
            r"labels of shape \(8,\) do not match .*expected \(8, 3\)",
        ),
        ({"head_arguments": {"stride": 2}}, "has stride=2, which"),
        ({"head_arguments": {"skip_bias_add": True}}, "has skip_bias_add=True, which"),
        ({"head_arguments": {"reduce_dtype": torch.float64}}, "has reduce_dtype=torch.float64, which"),
    ],
)
def test_chunked_loss_with_wrong_arguments_raises(on_tp, tp, arguments, message):
    def job():
        hidden, labels = make_tokens()
        rest = {"labels": labels, **arguments}
        head = make_head(**rest.pop("head_arguments", {}))
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(hidden, head, **rest)

    on_tp(tp, job)


def test_chunked_loss_of_a_model_learns_like_the_unchunked():
    def train(chunked):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double()
        head = make_head()
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.1)
        hidden, labels = make_tokens()
        for _ in range(5):
            optimizer.zero_grad()
            states = model(hidden)
            loss = (
                linear_cross_entropy(states, head, labels, chunk_size=7) if chunked else unchunked(states, head, labels)
            )
            loss.backward()
            optimizer.step()
        return loss.detach()

    assert_all_close([train(True)], [train(False)], rtol=1e-9)


def test_chunked_loss_of_a_head_on_other_ranks_follows_them_and_refuses_their_order(run_ranks):
    def job(size):
        initialize_model_parallel(tensor_model_parallel_size=1)
        hidden, labels = make_tokens()
        given = {} if size == 1 else {"tensor_model_parallel_group": torch.distributed.group.WORLD}
        if size > 1:
            with pytest.raises(ValueError, match=r"has rank_ordering=.*, which linear_cross_entropy"):
                linear_cross_entropy(hidden, make_head(rank_ordering=[1, 0], **given), labels)
        return linear_cross_entropy(hidden, make_head(**given), labels).item()

    assert len({round(it, 12) for it in (run_ranks(job, 1, 1) + run_ranks(job, 2, 2))}) == 1
