"""Layers in torch.compile and torch.export: no graph break, and the numbers of eager mode, gradients included."""

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
from nxd_layers.activation_checkpoint import apply_activation_checkpointing, matmul_outputs
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.sample(1)  # each takes its time

SEQUENCE, BATCH, HIDDEN, WIDE, VOCAB = 4, 2, 8, 12, 12
FLOAT64 = {"dtype": torch.float64}
SPLIT = {"sequence_parallel_enabled": True, **FLOAT64}


class SharedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = ColumnParallelLinear(HIDDEN, WIDE, gather_output=False, **FLOAT64)
        self.second = ColumnParallelLinear(HIDDEN, 2 * WIDE, bias=False, gather_output=False, **FLOAT64)

    def forward(self, hidden):
        return torch.cat(column_parallel_linears(hidden, [self.first, self.second]), dim=-1)


class QueryKeyValue(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.projections = GQAQKVColumnParallelLinear(HIDDEN, [HIDDEN, HIDDEN // 2], **FLOAT64, **arguments)

    def forward(self, hidden):
        return torch.cat(self.projections(hidden), dim=-1)


class Loss(nn.Module):
    def __init__(self, label_smoothing=0.0):
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits):
        labels = torch.arange(SEQUENCE * BATCH).view(SEQUENCE, BATCH)
        return parallel_cross_entropy(logits, labels, self.label_smoothing, ignore_index=3)


class Block(nn.Module):
    def __init__(self, sequence_parallel):
        super().__init__()
        on = {"sequence_parallel_enabled": sequence_parallel, **FLOAT64}
        self.norm = RMSNorm(HIDDEN, **on)
        self.up = ColumnParallelLinear(HIDDEN, WIDE, gather_output=False, **on)
        self.down = RowParallelLinear(WIDE, HIDDEN, input_is_parallel=True, **on)
        self.last_norm = RMSNorm(HIDDEN, **on)

    def forward(self, hidden):
        return hidden + self.last_norm(self.down(F.gelu(self.up(self.norm(hidden)))))


def checkpointed(sequence_parallel, keep=None):
    block = Block(sequence_parallel)
    apply_activation_checkpointing(block, Block, keep=keep)
    return block


def random(*shape):
    return torch.randn(*shape, **FLOAT64)


def linear_layers():
    """By name, each with an input of one of two ranks."""
    hidden, hidden_part = random(SEQUENCE, BATCH, HIDDEN), random(SEQUENCE // 2, BATCH, HIDDEN)
    wide_part = random(SEQUENCE, BATCH, WIDE // 2)
    column, row = ColumnParallelLinear, RowParallelLinear
    parallel = {"input_is_parallel": True}
    return {
        "column": (column(HIDDEN, WIDE, gather_output=False, **FLOAT64), hidden),
        "column, gathered": (column(HIDDEN, WIDE, stride=2, **FLOAT64), hidden),
        "column, sequence split": (column(HIDDEN, WIDE, gather_output=False, **SPLIT), hidden_part),
        "column, dim 1 split": (
            column(HIDDEN, WIDE, bias=False, gather_output=False, sequence_dimension=1, **SPLIT),
            hidden_part.transpose(0, 1),
        ),
        "columns that share an input": (SharedInput(), hidden),
        "query, key, value": (QueryKeyValue(), hidden),
        "query, key, value, not fused, split": (
            QueryKeyValue(fuse_qkv=False, gather_output=False, sequence_parallel_enabled=True),
            hidden_part,
        ),
        "query, key, value, copied heads": (
            QueryKeyValue(kv_size_multiplier=2, num_key_value_heads=1, gather_output=False),
            hidden,
        ),
        "row": (row(WIDE, HIDDEN, **parallel, **FLOAT64), wide_part),
        "row of a whole input": (row(HIDDEN, WIDE, **FLOAT64), hidden),
        "row, sequence split": (row(WIDE, HIDDEN, **parallel, **SPLIT), wide_part),
        "row, dim 1 split": (
            row(WIDE, HIDDEN, **parallel, sequence_dimension=1, **SPLIT),
            wide_part.transpose(0, 1),
        ),
    }


def other_layers():
    """By name, each with an input of one of two ranks."""
    ids = torch.randint(VOCAB - 1, (SEQUENCE, BATCH))
    hidden_part, logits = random(SEQUENCE // 2, BATCH, HIDDEN), random(SEQUENCE, BATCH, VOCAB // 2)
    embedding = ParallelEmbedding
    return {
        "embedding": (embedding(VOCAB, HIDDEN, padding_idx=2, **FLOAT64), ids),
        "embedding, padded vocabulary": (embedding(VOCAB - 1, HIDDEN, pad=True, **FLOAT64), ids),
        "embedding, split vectors": (embedding(VOCAB, HIDDEN, shard_across_embedding=True, **FLOAT64), ids),
        "embedding, sequence split": (embedding(VOCAB, HIDDEN, **SPLIT), ids),
        "RMSNorm": (RMSNorm(HIDDEN, **SPLIT), hidden_part),
        "LayerNorm": (LayerNorm(HIDDEN, **SPLIT), hidden_part),
        "cross entropy": (Loss(), logits),
        "cross entropy, smoothed": (Loss(0.1), logits),
    }


def checkpointed_blocks():
    """By name, each with an input of one of two ranks."""
    hidden, hidden_part = random(SEQUENCE, BATCH, HIDDEN), random(SEQUENCE // 2, BATCH, HIDDEN)
    return {
        "checkpointed": (checkpointed(False), hidden),
        "checkpointed, matmuls kept": (checkpointed(False, matmul_outputs), hidden),
        "checkpointed, sequence split": (checkpointed(True), hidden_part),
        "checkpointed, sequence split, matmuls kept": (checkpointed(True, matmul_outputs), hidden_part),
    }


def train(function, layer, input_):
    """Output and gradients of a step with a gradient that differs from element to element."""
    layer.zero_grad()
    input_ = input_.clone().requires_grad_(input_.is_floating_point())
    output = function(input_)
    output.backward(torch.arange(1.0, 1 + output.numel(), **FLOAT64).view(output.shape))
    return [output, input_.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_same(found, expected, name):
    for tensor, expected_tensor in zip(found, expected, strict=True):
        assert (tensor is None) == (expected_tensor is None), name
        if tensor is not None:
            torch.testing.assert_close(tensor, expected_tensor, rtol=1e-10, atol=1e-12, msg=lambda m: f"{name}: {m}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("cases", [linear_layers, other_layers, checkpointed_blocks])
def test_compiled_training_step_without_graph_breaks_equals_the_eager_one(on_tp, cases):
    def check():
        for name, (layer, input_) in cases().items():
            torch.compiler.reset()
            expected = train(layer, layer, input_)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            for _ in range(2):
                assert_same(train(compiled, layer, input_), expected, name)

    on_tp(2, check, timeout=600)  # the compiler is slow


@pytest.mark.sample(1)
@pytest.mark.parametrize("cases", [linear_layers, other_layers])
def test_compiled_layer_without_gradients_equals_the_eager_one(on_tp, cases):
    @torch.no_grad()
    def check():
        for name, (layer, input_) in cases().items():
            torch.compiler.reset()
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            assert_same([compiled(input_)], [layer(input_)], name)

    on_tp(2, check, timeout=600)  # the compiler is slow


@pytest.mark.sample(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("cases", [linear_layers, other_layers])
def test_exported_layer_equals_the_eager_one(on_tp, cases, strict):
    @torch.no_grad()
    def check():
        for name, (layer, input_) in cases().items():
            torch.compiler.reset()
            exported = torch.export.export(layer, (input_,), strict=strict).module()
            assert_same([exported(input_)], [layer(input_)], name)

    on_tp(2, check, timeout=600)  # the compiler is slow
