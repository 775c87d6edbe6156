"""Hand-written layers in the style of Megatron: tensor parallelism with sequence parallelism.

Activations between layers are [batch, seq/tp, hidden]. On an axis of one rank these are the layers of one process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from silent_bugs.programs.axis import ONE, Axis, gather, linear, reduce_scatter, split, sum_forward
from silent_bugs.programs.weights import IGNORED, generator

Faults = frozenset[str]


class ColumnLinear(nn.Linear):
    """A linear layer whose outputs are sharded: weight [out/tp, in]."""

    def __init__(self, inputs: int, outputs: int, tp: Axis) -> None:
        super().__init__(inputs, outputs // tp.size, bias=False)


class RowLinear(nn.Module):
    """A linear layer whose inputs are sharded; its output is reduce-scattered along the sequence."""

    def __init__(self, inputs: int, outputs: int, tp: Axis, faults: Faults) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.size))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.tp, self.faults = tp, faults

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, seq/tp, out] of [batch, seq, in/tp]."""
        partial = nn.functional.linear(x, self.weight)
        if "bias_added_before_the_sum" in self.faults:
            return reduce_scatter(partial + self.bias, 1, self.tp)
        return reduce_scatter(partial, 1, self.tp) + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding whose vocabulary is sharded; its output is whole on every rank."""

    def __init__(self, vocabulary: int, hidden: int, tp: Axis) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary // tp.size, hidden))
        self.tp = tp

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, seq, hidden] of tokens [batch, seq]."""
        own = tokens - self.tp.rank * self.weight.shape[0]
        is_own = (own >= 0) & (own < self.weight.shape[0])
        rows = nn.functional.embedding(own.clamp(0, self.weight.shape[0] - 1), self.weight)
        return sum_forward(rows * is_own.unsqueeze(-1), self.tp)


class Dropout(nn.Module):
    """Dropout of a tensor sharded along `dim`, rows over DP, with the mask that one process would draw."""

    def __init__(
        self, seed: int, dim: int, axis: Axis, dp: Axis = ONE, *, p: float = 0.2, is_same_on_all_ranks: bool = False
    ) -> None:
        super().__init__()
        self.seed, self.dim, self.axis, self.dp, self.p = seed, dim, axis, dp, p
        self.is_same_on_all_ranks = is_same_on_all_ranks
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with some values zeroed and the others scaled up."""
        self.calls += 1
        shape = list(x.shape)
        shape[0] *= self.dp.size
        if not self.is_same_on_all_ranks:
            shape[self.dim] *= self.axis.size
        kept = torch.rand(shape, generator=generator(self.seed * 1000 + self.calls)) >= self.p
        kept = self.dp.part(kept, 0)
        if not self.is_same_on_all_ranks:
            kept = self.axis.part(kept, self.dim)
        return x * kept / (1 - self.p)


class Attention(nn.Module):
    """Causal attention with norms of heads; `is_grouped` shares one key and value head."""

    def __init__(self, hidden: int, heads: int, tp: Axis, faults: Faults, *, is_grouped: bool) -> None:
        super().__init__()
        self.size, self.tp, self.is_grouped = hidden // heads, tp, is_grouped
        if is_grouped:
            self.q = ColumnLinear(hidden, hidden, tp)
            self.kv = nn.Linear(hidden, 2 * self.size)
        else:
            self.qkv = ColumnLinear(hidden, 3 * hidden, tp)
        self.q_norm, self.k_norm = nn.RMSNorm(self.size), nn.RMSNorm(self.size)
        self.out_norm = nn.RMSNorm(self.size)
        self.proj = RowLinear(hidden, hidden, tp, faults)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, seq/tp, hidden] of [batch, seq/tp, hidden]."""
        x = gather(x, 1, self.tp)
        if self.is_grouped:
            q, (k, v) = self._heads(self.q(x)), (self._heads(part) for part in self.kv(x).chunk(2, -1))
        else:
            q, k, v = (self._heads(part) for part in self.qkv(x).chunk(3, -1))
        q, k = self.q_norm(q), self.k_norm(k)
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return self.proj(self.out_norm(scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)


class GatedMLP(nn.Module):
    """A SwiGLU MLP; gate and up are fused in fc1."""

    def __init__(self, hidden: int, tp: Axis, dp: Axis, faults: Faults, seed: int) -> None:
        super().__init__()
        self.tp = tp
        self.fc1 = ColumnLinear(hidden, 4 * hidden, tp)
        same = "hidden_dropout_same_on_tp_ranks" in faults
        self.dropout = Dropout(seed, -1, tp, dp, is_same_on_all_ranks=same)
        self.fc2 = RowLinear(2 * hidden, hidden, tp, faults)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, seq/tp, hidden] of [batch, seq/tp, hidden]."""
        gate, up = self.fc1(gather(x, 1, self.tp)).chunk(2, -1)
        return self.fc2(self.dropout(nn.functional.silu(gate) * up))


class _Recompute(torch.autograd.Function):
    """Calls a function again in backward; each rank keeps a part of the input, which is gathered over `axis`."""

    @staticmethod
    def forward(ctx, function, kept, axis, x, *parameters):  # type: ignore[no-untyped-def]
        ctx.function, ctx.axis, ctx.parameters, ctx.shape = function, axis, parameters, x.shape
        ctx.save_for_backward(kept.part(x.detach().flatten(), 0))
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x = ctx.axis.gather(ctx.saved_tensors[0], 0).view(ctx.shape).requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        gradients = torch.autograd.grad(output, [x, *ctx.parameters], gradient)
        return None, None, None, *gradients


class ReplicatedMixer(nn.Module):
    """A layer that every rank computes for the whole sequence, recomputed in backward from a distributed input."""

    def __init__(self, hidden: int, tp: Axis, wrong: Axis, faults: Faults) -> None:
        super().__init__()
        self.mix = nn.Linear(hidden, hidden)
        self.tp, self.wrong, self.faults = tp, wrong, faults

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, seq/tp, hidden] of [batch, seq/tp, hidden]."""
        if self.tp.size > 1:
            # The gradient of a computation that is equal on all ranks is whole already.
            summed = "replicated_gradients_reduce_scattered" in self.faults
            transpose = (
                (lambda g: self.tp.part(self.tp.sum(g), 1)) if summed else (lambda g: self.tp.part(g, 1).contiguous())
            )
            x = linear(x, lambda y: self.tp.gather(y, 1), transpose)
        group = self.wrong if "recompute_gathers_over_another_group" in self.faults else self.tp
        mixed = _Recompute.apply(lambda y: torch.tanh(self.mix(y)), self.tp, group, x, *self.mix.parameters())
        return split(mixed, 1, self.tp)


class VocabParallelCrossEntropy(nn.Module):
    """Cross entropy with label smoothing of logits whose vocabulary is sharded, over labels that are not ignored."""

    def __init__(self, tp: Axis, dp: Axis, faults: Faults, *, smoothing: float = 0.1) -> None:
        super().__init__()
        self.tp, self.dp, self.faults, self.smoothing = tp, dp, faults, smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over the whole batch, times the size of DP, of logits [batch, seq, vocab/tp]."""
        vocabulary = logits.shape[-1]
        shifted = logits - self.tp.max(logits.amax(-1, keepdim=True))
        log_sum = sum_forward(shifted.exp().sum(-1), self.tp).log()
        own = labels - self.tp.rank * vocabulary
        is_own = (own >= 0) & (own < vocabulary)
        picked = shifted.gather(-1, own.clamp(0, vocabulary - 1).unsqueeze(-1)).squeeze(-1)
        target = sum_forward(picked * is_own, self.tp)
        if "label_smoothing_over_local_vocabulary" in self.faults:
            mean = shifted.mean(-1)
        else:
            mean = sum_forward(shifted.sum(-1), self.tp) / (vocabulary * self.tp.size)
        losses = log_sum - (1 - self.smoothing) * target - self.smoothing * mean
        is_counted = labels != IGNORED
        count = self.dp.sum(is_counted.sum())
        return (losses * is_counted).sum() / count * self.dp.size
