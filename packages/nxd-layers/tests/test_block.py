"""Layers put together: a small language model, the same numbers as plain torch at every degree and layout, with the
fewest collectives, and through autocast, activation checkpointing and torch.compile.
"""

import pytest
import torch
from nxd_layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    RMSNorm,
    RowParallelLinear,
    column_parallel_linears,
    parallel_cross_entropy,
)
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.smoke

VOCAB, HIDDEN, SEQUENCE = 24, 12, 12


class Model(nn.Module):
    """Embedding, one gated feed-forward block, norms and a head; ids and loss are `[seq, batch]`, or the reverse."""

    def __init__(self, sequence_dim=None, *, checkpointed=False, dtype=torch.float64):
        super().__init__()
        on = {"sequence_parallel_enabled": sequence_dim is not None, "dtype": dtype}
        split = {**on, "sequence_dimension": sequence_dim or 0}
        self.sequence_dim, self.checkpointed = sequence_dim, checkpointed
        self.embedding = ParallelEmbedding(VOCAB, HIDDEN, **split)
        self.norm = RMSNorm(HIDDEN, 1e-6, **on)
        self.gate = ColumnParallelLinear(HIDDEN, 24, gather_output=False, **split)
        self.up = ColumnParallelLinear(HIDDEN, 24, gather_output=False, **split)
        self.down = RowParallelLinear(24, HIDDEN, input_is_parallel=True, **split)
        self.last_norm = LayerNorm(HIDDEN, **on)
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, gather_output=False, **split)

    def feed_forward(self, hidden):
        gate, up = column_parallel_linears(self.norm(hidden), [self.gate, self.up])
        return self.down(F.silu(gate) * up)

    def forward(self, ids):
        hidden = self.embedding(ids)
        if self.checkpointed:
            hidden = hidden + checkpoint(self.feed_forward, hidden, use_reentrant=False)
        else:
            hidden = hidden + self.feed_forward(hidden)
        return parallel_cross_entropy(self.head(self.last_norm(hidden)), ids, 0.1)


def plain_loss(weights, ids):
    """The same model on whole weights, by name, in plain torch."""

    def linear(hidden, name):
        return F.linear(hidden, weights[f"{name}.weight"], weights[f"{name}.bias"])

    hidden = F.embedding(ids, weights["embedding.weight"])
    normed = hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + 1e-6) * weights["norm.weight"]
    hidden = hidden + linear(F.silu(linear(normed, "gate")) * linear(normed, "up"), "down")
    last = F.layer_norm(hidden, (HIDDEN,), weights["last_norm.weight"], weights["last_norm.bias"])
    logits = linear(last, "head")
    return F.cross_entropy(logits.reshape(-1, VOCAB), ids.reshape(-1), reduction="none", label_smoothing=0.1)


@pytest.fixture
def check_against_plain_torch(logical, assert_same):
    """Compares loss and every gradient of a model with plain torch's."""
    import nxd_state

    def check(model):
        torch.manual_seed(1)
        ids = torch.randint(0, VOCAB, (SEQUENCE, SEQUENCE))
        weights = {name: logical(p).clone().requires_grad_() for name, p in model.named_parameters()}
        expected = plain_loss(weights, ids)
        expected.mean().backward()

        loss = model(ids)
        loss.mean().backward()

        assert_same(loss.reshape(-1), expected)
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            if getattr(parameter, "sequence_parallel_enabled", False):
                grad = nxd_state.all_reduce(grad, nxd_state.get_group("tp"))
            assert_same(logical(parameter, grad), weights[name].grad)

    return check


@pytest.mark.pairs
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_model_equals_plain_torch(on_tp, check_against_plain_torch, tp, sequence_dim, checkpointed):
    def job():
        check_against_plain_torch(Model(sequence_dim, checkpointed=checkpointed))

    on_tp(tp, job)


@pytest.mark.parametrize(
    ("sequence_dim", "forward", "backward"),
    [
        # embedding, down, twice the loss; input gradients of the head and of gate and up together
        (None, ["allreduce_"] * 4, ["allreduce_"] * 2),
        # each sum as a reduce-scatter (gloo: alltoall) and an all-gather, at the borders of the region
        (
            0,
            ["alltoall_base_", "_allgather_base_", "alltoall_base_", "_allgather_base_", "allreduce_", "allreduce_"],
            ["alltoall_base_", "_allgather_base_", "alltoall_base_", "_allgather_base_"],
        ),
    ],
)
def test_model_communicates_no_more_than_it_must(on_tp, collectives, sequence_dim, forward, backward):
    def job():
        model, losses = Model(sequence_dim), []
        ids = torch.arange(VOCAB).view(12, 2)
        in_forward = collectives(lambda: losses.append(model(ids)))
        in_backward = collectives(lambda: losses[0].mean().backward())
        return [[name.removeprefix("c10d::") for name in names] for names in (in_forward, in_backward)]

    assert on_tp(2, job) == [[forward, backward]] * 2


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_model_of_frozen_weights_has_gradients_where_it_learns(on_tp, logical, assert_same, tp, sequence_dim):
    def job():
        ids = torch.randint(0, VOCAB, (SEQUENCE, SEQUENCE))
        torch.manual_seed(2)
        learning, frozen = Model(sequence_dim), Model(sequence_dim)
        frozen.load_state_dict(learning.state_dict())
        frozen.requires_grad_(False).embedding.requires_grad_(True)
        learning(ids).mean().backward()
        frozen(ids).mean().backward()
        assert_same(frozen.embedding.weight.grad, learning.embedding.weight.grad)
        assert [name for name, p in frozen.named_parameters() if p.grad is not None] == ["embedding.weight"]

    on_tp(tp, job)


def test_frozen_column_linear_keeps_no_input_for_backward(on_tp):
    def job():
        layer = ColumnParallelLinear(4, 8).requires_grad_(False)
        input_ = torch.ones(3, 4, requires_grad=True)
        output = layer(input_)
        saved = [tensor for tensor in output.grad_fn.next_functions[0][0].saved_tensors if tensor is not None]
        assert [tensor.shape for tensor in saved] == [layer.weight.shape]

    on_tp(2, job)


def gradients(model, ids):
    model.zero_grad()
    model(ids).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("sequence_dim", [None, 0])
@pytest.mark.parametrize("tp", [1, 2])
def test_model_under_autocast_computes_in_bfloat16_with_float32_gradients(on_tp, tp, sequence_dim):
    def job():
        torch.manual_seed(2)
        model = Model(sequence_dim, dtype=torch.float32)
        ids = torch.randint(0, VOCAB, (SEQUENCE, SEQUENCE))
        exact = gradients(model, ids)
        with torch.autocast("cpu", torch.bfloat16):
            assert model.gate(torch.ones(12, 2, HIDDEN)).dtype == torch.bfloat16
            assert model.down(torch.ones(12, 2, 24 // tp)).dtype == torch.bfloat16
            loss = model(ids)
        assert loss.dtype == torch.float32
        model.zero_grad()
        loss.mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == torch.float32
            error = (parameter.grad - exact[name]).norm() / exact[name].norm()
            assert 0 < error < 0.05, name

    on_tp(tp, job)


def test_shapes_can_be_asked_for_without_memory(on_tp):
    def job():
        layer = ColumnParallelLinear(HIDDEN, 24, gather_output=False, device="meta")
        assert layer(torch.empty(3, HIDDEN, device="meta")).shape == (3, 12)

    on_tp(2, job)


class SentBytes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::allreduce_":
            self.counts.append(args[0][0].nbytes)
        if func._schema.name == "c10d::_allgather_base_":
            self.counts.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def sent_bytes():
    """`sent_bytes()`: a context whose `counts` are the bytes that this rank hands to all-reduces and all-gathers."""
    return SentBytes


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast_moves_two_bytes_per_number_between_the_ranks(on_tp, sent_bytes, sequence_parallel):
    def job():
        layer = ColumnParallelLinear(4, 8, gather_output=False, sequence_parallel_enabled=sequence_parallel)
        with sent_bytes() as sent:
            with torch.autocast("cpu", torch.bfloat16):
                output = layer(torch.ones(3, 4, requires_grad=True))
            output.sum().backward()
        return sent.counts

    assert on_tp(2, job) == [[3 * 4 * 2]] * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_autocast_leaves_float64_alone_as_torch_does(on_tp, tp):
    def job():
        layer = ColumnParallelLinear(4, 8, dtype=torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.ones(3, 4, dtype=torch.float64)).dtype == torch.float64

    on_tp(tp, job)


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_model_compiled_into_one_graph_gives_the_same_numbers(on_tp, assert_same, sequence_dim):
    def job():
        torch.manual_seed(2)
        model = Model(sequence_dim)
        ids = torch.randint(0, VOCAB, (SEQUENCE, SEQUENCE))
        expected, expected_loss = gradients(model, ids), model(ids)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found, loss = gradients(compiled, ids), compiled(ids)
        assert_same(loss, expected_loss)
        for name, grad in expected.items():
            assert_same(found[f"_orig_mod.{name}"], grad)

    on_tp(2, job)
