"""A GPT with tensor, sequence and data parallelism by hand, in the style of Megatron-LM, and mistakes to switch on.

    torchrun --standalone --nproc-per-node 4 megatron_style.py --tp 2

splits the layers over two ranks, which share the sequence between the layers, and the batch over two such groups.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, HIDDEN, HEADS, LENGTH, BATCH, LAYERS = 48, 16, 4, 8, 4, 2


class Groups:
    """The groups of this rank; a group of one process needs no communication."""

    def __init__(self, tp: int) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.tp_size, self.dp_size, self.tp_rank, self.dp_rank = tp, world // tp, rank % tp, rank // tp
        self.tp = self.dp = None
        if world > 1:
            of_tp = [list(range(first, first + tp)) for first in range(0, world, tp)]
            of_dp = [list(range(first, world, tp)) for first in range(tp)]
            self.tp = [dist.new_group(ranks) for ranks in of_tp][self.dp_rank]
            self.dp = [dist.new_group(ranks) for ranks in of_dp][self.tp_rank]

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        dist.all_gather(parts, x.contiguous(), group=self.tp)
        return torch.cat(parts)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=self.tp)
        return x

    def own(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.chunk(self.tp_size, dim)[self.tp_rank]


class Gather(torch.autograd.Function):
    """Sequence parts to the whole sequence; backward adds up the ranks' gradients and keeps a part."""

    @staticmethod
    def forward(ctx, x, groups, is_summed):
        ctx.groups, ctx.is_summed = groups, is_summed
        return groups.gathered(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = ctx.groups.summed(gradient) if ctx.is_summed else gradient
        return ctx.groups.own(gradient), None, None


class ReduceScatter(torch.autograd.Function):
    """Parts of a sum to the sum's sequence parts."""

    @staticmethod
    def forward(ctx, x, groups):
        ctx.groups = groups
        return groups.own(groups.summed(x)).clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.groups.gathered(gradient), None


class Sum(torch.autograd.Function):
    """All-reduce in forward, nothing in backward."""

    @staticmethod
    def forward(ctx, x, groups):
        return groups.summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ColumnParallel(nn.Module):
    def __init__(self, outputs, groups, parts=1, is_summed=True):
        super().__init__()
        self.groups, self.is_summed = groups, is_summed
        whole = torch.randn(outputs, HIDDEN) * 0.3
        matrices = [groups.own(it) for it in whole.chunk(parts)]  # each of q, k and v has heads of all ranks
        self.weight = nn.Parameter(torch.cat(matrices).clone())
        self.bias = nn.Parameter(torch.zeros(outputs // groups.tp_size))

    def forward(self, x):
        if self.groups.tp_size > 1:
            x = Gather.apply(x, self.groups, self.is_summed)
        return F.linear(x, self.weight, self.bias)


class RowParallel(nn.Module):
    def __init__(self, inputs, groups, is_bias_repeated=False):
        super().__init__()
        self.groups, self.is_bias_repeated = groups, is_bias_repeated
        self.weight = nn.Parameter(groups.own(torch.randn(HIDDEN, inputs) * 0.3, 1).clone())
        self.bias = nn.Parameter(torch.randn(HIDDEN) * 0.1)

    def forward(self, x):
        out = F.linear(x, self.weight, self.bias if self.is_bias_repeated else None)
        if self.groups.tp_size > 1:
            out = ReduceScatter.apply(out, self.groups)
        return out if self.is_bias_repeated else out + self.bias


class Attention(nn.Module):
    """On [sequence, batch, hidden], with a fused projection of q, k and v."""

    def __init__(self, groups, fault):
        super().__init__()
        self.heads = HEADS // groups.tp_size
        self.qkv = ColumnParallel(3 * HIDDEN, groups, 1 if fault == "qkv split as one matrix" else 3)
        self.proj = RowParallel(HIDDEN, groups)

    def forward(self, x):
        qkv = self.qkv(x)
        q, k, v = (it.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3) for it in qkv.chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.permute(2, 0, 1, 3).flatten(2))


class Layer(nn.Module):
    def __init__(self, groups, fault):
        super().__init__()
        self.input_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention(groups, fault)
        self.up = ColumnParallel(4 * HIDDEN, groups, is_summed=fault != "input gradient not summed")
        self.down = RowParallel(4 * HIDDEN, groups, fault == "bias on every rank")

    def forward(self, x):
        x = x + self.attention(self.input_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class VocabularyEmbedding(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(groups.own(torch.randn(VOCABULARY, HIDDEN)).clone())

    def forward(self, tokens):
        if self.groups.tp_size == 1:
            return F.embedding(tokens, self.weight).transpose(0, 1)
        local = tokens - self.groups.tp_rank * len(self.weight)
        is_other = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(is_other, 0), self.weight).masked_fill(is_other[..., None], 0.0)
        return ReduceScatter.apply(found.transpose(0, 1), self.groups)


class GPT(nn.Module):
    def __init__(self, groups, fault):
        super().__init__()
        self.embedding = VocabularyEmbedding(groups)
        self.layers = nn.ModuleList(Layer(groups, fault if number == 1 else "") for number in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = ColumnParallel(VOCABULARY, groups)

    def forward(self, tokens):
        """Logits of the rank's part of the vocabulary, [sequence, batch, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def vocabulary_parallel_cross_entropy(logits, labels, groups):
    """The loss of each token, of logits whose vocabulary is split."""
    if groups.tp_size == 1:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups.tp)
    shifted = logits - largest[..., None]
    total = Sum.apply(shifted.exp().sum(-1), groups)
    local = labels - groups.tp_rank * logits.shape[-1]
    is_other = (local < 0) | (local >= logits.shape[-1])
    wanted = shifted.gather(-1, local.masked_fill(is_other, 0)[..., None])[..., 0].masked_fill(is_other, 0.0)
    return total.log() - Sum.apply(wanted, groups)


def finish_gradients(model, groups, fault):
    """Add up gradients of what sees a part of the sequence, over the tensor-parallel group; average over replicas."""
    for name, parameter in model.named_parameters():
        is_of_sequence = "norm" in name or name.endswith(("proj.bias", "down.bias"))
        is_forgotten = fault == "norm not summed" and name == "layers.1.mlp_norm.weight"
        if groups.tp_size > 1 and is_of_sequence and not is_forgotten:
            dist.all_reduce(parameter.grad, group=groups.tp)
        if groups.dp_size > 1:
            dist.all_reduce(parameter.grad, group=groups.dp)
            parameter.grad /= groups.dp_size
            if fault == "averaged twice" and name.startswith("layers.0."):
                parameter.grad /= groups.dp_size


def train(fault="", *, tp=1, steps=2):
    """Train a few steps on made-up tokens, of which some are masked."""
    groups = Groups(tp)
    model = GPT(groups, fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(0 if fault == "data not advanced" else step)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        is_counted = torch.rand(BATCH, LENGTH, generator=generator) < torch.linspace(0.4, 1.0, BATCH)[:, None]
        total = is_counted.sum() / groups.dp_size
        tokens, is_counted = (it.chunk(groups.dp_size)[groups.dp_rank] for it in (tokens, is_counted))
        if fault == "mean over local tokens":
            total = is_counted.sum()
        losses = vocabulary_parallel_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].T, groups)
        loss = (losses * is_counted.T).sum() / total
        loss.backward()
        finish_gradients(model, groups, fault)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    train(options.fault, tp=options.tp)
