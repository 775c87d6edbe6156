"""bfloat16 and float16: every layer runs, and is as far from float32 as the same layer in plain torch.

Weights and inputs are those of the short dtype in both, so that only the computation differs. Where one process rounds
a product once, ranks that sum their parts of it round each part, each sum, and the bias on top: independent errors
of which two ranks make three and four ranks five, so sqrt(3) and sqrt(5) times the error at most. Weight gradients
need no such sum and are as exact as in one process.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from nxd_layers import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    RMSNorm,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    parallel_cross_entropy,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_state import active_group
from torch import nn
from torch.nn import functional as F

SEQUENCE, BATCH, HIDDEN, WIDE, VOCAB = 16, 4, 64, 96, 128
ROUNDINGS = {1: 1, 2: 3, 4: 5}  # of a sum over the ranks, by tensor-parallel degree
NOISE, FLOAT32_ROUNDING = 1.1, 1e-6


@dataclass
class Case:
    """A layer that takes whole inputs to whole outputs, and the same in plain torch on the whole weights."""

    layer: nn.Module
    plain: Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]
    input: torch.Tensor


class SequenceParallel(nn.Module):
    """A sequence-parallel block, from and to whole sequences."""

    def __init__(self, dtype):
        super().__init__()
        on = {"sequence_parallel_enabled": True, "dtype": dtype}
        self.norm = RMSNorm(HIDDEN, 1e-6, **on)
        self.up = ColumnParallelLinear(HIDDEN, WIDE, gather_output=False, **on)
        self.down = RowParallelLinear(WIDE, HIDDEN, input_is_parallel=True, **on)

    def forward(self, hidden):
        part = scatter_to_sequence_parallel_region(hidden)
        part = part + self.down(F.silu(self.up(self.norm(part))))
        return gather_from_sequence_parallel_region(part, to_model_parallel=False)


class QueryKeyValue(nn.Module):
    """Two key and value heads of 8; with more ranks than heads, copies of them."""

    def __init__(self, dtype):
        super().__init__()
        copies = max(1, active_group("tp").size // 2)
        self.projections = GQAQKVColumnParallelLinear(
            HIDDEN, [HIDDEN, 16], dtype=dtype, fuse_qkv=False, kv_size_multiplier=copies, num_key_value_heads=2
        )

    def forward(self, hidden):
        return torch.cat(self.projections(hidden), dim=-1)


class Loss(nn.Module):
    def forward(self, logits):
        return parallel_cross_entropy(scatter_to_tensor_model_parallel_region(logits), labels(), 0.1)


def labels():
    return torch.arange(SEQUENCE * BATCH).view(SEQUENCE, BATCH) % VOCAB


def plain_linear(weights, hidden):
    return F.linear(hidden, weights["weight"], weights["bias"])


def plain_query_key_value(weights, hidden):
    named = [(weights[f"projections.weight_{name}"], weights[f"projections.bias_{name}"]) for name in "qkv"]
    return torch.cat([F.linear(hidden, weight, bias) for weight, bias in named], dim=-1)


def plain_block(weights, hidden):
    normed = F.rms_norm(hidden, (HIDDEN,), weights["norm.weight"], 1e-6)
    inner = F.silu(F.linear(normed, weights["up.weight"], weights["up.bias"]))
    return hidden + F.linear(inner, weights["down.weight"], weights["down.bias"])


def plain_loss(weights, logits):
    wide = logits.float().flatten(0, 1)  # as mixed-precision training does
    return F.cross_entropy(wide, labels().flatten(), reduction="none", label_smoothing=0.1).view(SEQUENCE, BATCH)


def cases(dtype):
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN).to(dtype)
    norms = {"sequence_parallel_enabled": False, "dtype": dtype}
    return {
        "column": Case(ColumnParallelLinear(HIDDEN, WIDE, dtype=dtype), plain_linear, hidden),
        "row": Case(RowParallelLinear(HIDDEN, WIDE, dtype=dtype), plain_linear, hidden),
        "query, key, value": Case(QueryKeyValue(dtype), plain_query_key_value, hidden),
        "sequence-parallel block": Case(SequenceParallel(dtype), plain_block, hidden),
        "embedding": Case(
            ParallelEmbedding(VOCAB, HIDDEN, dtype=dtype),
            lambda weights, ids: F.embedding(ids, weights["weight"]),
            labels(),
        ),
        "RMSNorm": Case(
            RMSNorm(HIDDEN, 1e-6, **norms),
            lambda weights, hidden: F.rms_norm(hidden, (HIDDEN,), weights["weight"], 1e-6),
            hidden,
        ),
        "LayerNorm": Case(
            LayerNorm(HIDDEN, **norms),
            lambda weights, hidden: F.layer_norm(hidden, (HIDDEN,), weights["weight"], weights["bias"]),
            hidden,
        ),
        "cross entropy": Case(Loss(), plain_loss, 4 * torch.randn(SEQUENCE, BATCH, VOCAB).to(dtype)),
    }


def differentiate(function, input_):
    """Output, in its dtype, and the input's gradient, for a gradient of the output that all dtypes hold exactly."""
    input_ = input_.clone().requires_grad_(input_.is_floating_point())
    output = function(input_)
    grad = torch.randint(-4, 5, output.shape, generator=torch.Generator().manual_seed(2)) / 4
    output.backward(grad.to(output.dtype))
    return {"output": output.detach()} | ({} if input_.grad is None else {"input": input_.grad})


def plain_results(case, weights, dtype):
    weights = {name: weight.to(dtype).requires_grad_() for name, weight in weights.items()}
    input_ = case.input.to(dtype) if case.input.is_floating_point() else case.input
    results = differentiate(lambda x: case.plain(weights, x), input_)
    return results | {name: weight.grad for name, weight in weights.items()}


def error(found, exact):
    """Root mean square of the difference, as a share of the exact tensor's."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.sample(4)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_layer_is_as_near_to_float32_as_plain_torch(on_tp, logical, summed_grad, tp, dtype):
    def check():
        for name, case in cases(dtype).items():
            weights = {key: logical(parameter).clone() for key, parameter in case.layer.named_parameters()}
            exact = plain_results(case, weights, torch.float32)
            plain = plain_results(case, weights, dtype)

            found = differentiate(case.layer, case.input)
            for key, parameter in case.layer.named_parameters():
                is_whole = hasattr(parameter, "sequence_parallel_enabled")
                found[key] = logical(parameter, summed_grad(parameter) if is_whole else parameter.grad)

            assert found.keys() == exact.keys(), name
            for key, tensor in found.items():
                assert tensor.dtype == plain[key].dtype, (name, key)
                ours, reference = error(tensor, exact[key]), error(plain[key], exact[key])
                assert ours <= NOISE * ROUNDINGS[tp] ** 0.5 * reference + FLOAT32_ROUNDING, (name, key, ours, reference)

    on_tp(tp, check)
