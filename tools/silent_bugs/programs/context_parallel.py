"""A transformer layer with ring attention over a zigzag sequence, on 2 ranks.

The sequence has 2 CP parts; rank r holds part r and part 2 CP - 1 - r. Keys and values go around the ring, in forward
and again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from silent_bugs.programs.axis import ONE, Axis, world
from silent_bugs.programs.megatron import Faults
from silent_bugs.programs.weights import IGNORED, VOCABULARY, batch, default_dtype, fill, whole_parameters

RANKS = 2
HIDDEN = 12
HEADS = 2
LENGTH = 8


def zigzag(x: Tensor, cp: Axis) -> Tensor:
    """Return this rank's two parts of the sequence of [rows, length, ...]."""
    if cp.size == 1:
        return x
    parts = x.chunk(2 * cp.size, 1)
    return torch.cat([parts[cp.rank], parts[2 * cp.size - 1 - cp.rank]], 1)


def _rotated(tensors: list[Tensor], cp: Axis) -> list[Tensor]:
    """Send tensors to the next rank of the ring, and return those of the previous one."""
    if cp.size == 1:
        return tensors
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = []
    for ours, theirs in zip(tensors, received, strict=True):
        operations += [
            dist.P2POp(dist.isend, ours.contiguous(), (cp.rank + 1) % cp.size),
            dist.P2POp(dist.irecv, theirs, (cp.rank - 1) % cp.size),
        ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


class _RingAttention(torch.autograd.Function):
    """Causal attention over the ring; inputs are [rows, heads, local length, size], positions [local length]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, others: list[Tensor], cp: Axis, faults: Faults
    ) -> Tensor:
        output, log_sum = torch.zeros_like(q), torch.full_like(q[..., :1], float("-inf"))
        keys = [k, v]
        for step in range(cp.size):
            scores = _scores(q, keys[0], positions, others[(cp.rank - step) % cp.size])
            of_block = scores.logsumexp(-1, keepdim=True)
            total = torch.logaddexp(log_sum, of_block)
            part = torch.nan_to_num((scores - of_block).exp()) @ keys[1]
            output = (
                torch.nan_to_num((log_sum - total).exp()) * output + torch.nan_to_num((of_block - total).exp()) * part
            )
            log_sum, keys = total, _rotated(keys, cp)
        ctx.save_for_backward(q, k, v, output, log_sum, positions)
        ctx.others, ctx.cp, ctx.faults = others, cp, faults
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        q, k, v, output, log_sum, positions = ctx.saved_tensors
        cp, faults = ctx.cp, ctx.faults
        of_q, rotating = torch.zeros_like(q), [k, v, torch.zeros_like(k), torch.zeros_like(v)]
        row_sum = (gradient * output).sum(-1, keepdim=True)
        for step in range(cp.size):
            key, value = (k, v) if "backward_with_keys_of_the_first_step" in faults else rotating[:2]
            weights = (_scores(q, key, positions, ctx.others[(cp.rank - step) % cp.size]) - log_sum).exp()
            of_weights = gradient @ value.transpose(-1, -2)
            correction = row_sum
            if "softmax_correction_of_one_block" in faults:
                correction = (weights * of_weights).sum(-1, keepdim=True)
            of_scores = weights * (of_weights - correction) / q.shape[-1] ** 0.5
            of_q = of_q + of_scores @ key
            rotating[2] = rotating[2] + of_scores.transpose(-1, -2) @ q
            rotating[3] = rotating[3] + weights.transpose(-1, -2) @ gradient
            rotating = _rotated(rotating, cp)
        return of_q, rotating[2], rotating[3], None, None, None, None


def _scores(q: Tensor, k: Tensor, positions: Tensor, others: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(positions.unsqueeze(-1) < others, float("-inf"))


class Rotary(nn.Module):
    """Rotates pairs of features by an angle that grows with the position."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return [rows, heads, length, size] of the same shape; positions are [length]."""
        half = x.shape[-1] // 2
        angles = positions.to(x.dtype).unsqueeze(-1) * 0.3 ** torch.arange(half, dtype=x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, cp: Axis, faults: Faults) -> None:
        super().__init__()
        self.cp, self.faults = cp, faults
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.rotary = Rotary()
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, local length, hidden] of [rows, local length, hidden]."""
        parts = [zigzag(torch.arange(LENGTH)[None], Axis(None, rank, self.cp.size))[0] for rank in range(self.cp.size)]
        positions = parts[self.cp.rank]
        angles = torch.arange(len(positions)) if "rotary_positions_count_from_zero" in self.faults else positions
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = self.rotary(q, angles), self.rotary(k, angles)
        mixed = _RingAttention.apply(q, k, v.contiguous(), positions, parts, self.cp, self.faults)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """An embedding, attention, an MLP and a head."""

    def __init__(self, cp: Axis, faults: Faults) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.input_norm, self.post_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention(cp, faults)
        self.fc = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens [rows, local length]."""
        x = self.embedding(tokens)
        x = x + self.attention(self.input_norm(x))
        return self.head(x + torch.tanh(self.fc(self.post_norm(x))))


def local_batch(step: int, cp: Axis, faults: Faults) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the tokens and labels, [rows, local length]."""
    other = cp.rank if "context_ranks_read_different_rows" in faults else 0
    tokens, labels = batch(step + 50 * other, rows=4, length=LENGTH)
    local, targets = zigzag(tokens, cp), zigzag(labels, cp)
    if cp.size > 1 and "labels_shifted_after_the_split" in faults:
        targets = torch.cat([local[:, 1:], torch.full_like(local[:, :1], IGNORED)], 1)
        targets = torch.where(zigzag(labels, cp) == IGNORED, IGNORED, targets)
    if cp.size > 1 and "last_label_of_each_part_ignored" in faults:
        half = local.shape[1] // 2
        targets[:, half - 1] = targets[:, -1] = IGNORED
    return local, targets


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model]:
    """Train; return this rank's model."""
    cp = world()
    with default_dtype(dtype):
        model = Model(cp, faults)
    fill(model, {}, ONE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(1, steps + 1):
        tokens, labels = local_batch(step, cp, faults)
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(
            model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = losses / cp.sum((labels != IGNORED).sum())
        if "mean_of_the_means_of_ranks" in faults:
            loss = losses / (labels != IGNORED).sum() / cp.size
        if "loss_multiplied_by_the_context_ranks" in faults:
            loss = loss * cp.size
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(cp.sum(parameter.grad))
            if "gradients_averaged_over_context_ranks" in faults:
                parameter.grad /= cp.size
        optimizer.step()
    return (model,)


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters."""
    return whole_parameters(run(faults, dtype, steps)[0], {}, ONE)
