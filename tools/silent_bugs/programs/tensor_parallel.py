"""A small transformer by hand-written tensor and sequence parallelism, on 2 ranks, or on 4 as TP 2 by DP 2.

With 4 ranks the tensor-parallel groups are {0, 2} and {1, 3}: not those of neighbouring ranks, which code that ignores
the model's own groups would take.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from silent_bugs.programs.axis import ONE, Axis, axis_of, gather, linear, split, sum_forward, world
from silent_bugs.programs.megatron import (
    Attention,
    ColumnLinear,
    Dropout,
    Faults,
    GatedMLP,
    ReplicatedMixer,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
)
from silent_bugs.programs.weights import VOCABULARY, Shard, batch, default_dtype, fill, shard_of, whole_parameters

RANKS = 2
HIDDEN = 16

SHARDS = {
    "*.qkv.weight": Shard(0, parts=3),
    "*.fc1.weight": Shard(0, parts=2),
    "*.q.weight": Shard(0),
    "*.proj.weight": Shard(1),
    "*.fc2.weight": Shard(1),
    "embedding.weight": Shard(0),
    "head.weight": Shard(0),
}
# Shards whose rows are cut without regard to the matrices that are fused in them.
AS_ONE_MATRIX = {"*.qkv.weight": Shard(0)}


class Layer(nn.Module):
    """A layer; the second one has grouped attention, a replicated mixer and a router besides."""

    def __init__(self, index: int, tp: Axis, dp: Axis, wrong: Axis, faults: Faults) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention(HIDDEN, 4, tp, faults, is_grouped=index == 1)
        same = "sequence_dropout_same_on_tp_ranks" in faults
        self.dropout = Dropout(10 + index, 1, tp, dp, is_same_on_all_ranks=same)
        self.mlp = GatedMLP(HIDDEN, tp, dp, faults, 20 + index)
        self.mixer_norm = nn.RMSNorm(HIDDEN) if index else None
        self.mixer = ReplicatedMixer(HIDDEN, tp, wrong, faults) if index else None

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, seq/tp, hidden] of [batch, seq/tp, hidden]."""
        x = x + self.dropout(self.attention(self.input_norm(x)))
        if self.mixer_norm is not None and self.mixer is not None:
            x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.post_norm(x))


class Model(nn.Module):
    """A transformer with a router whose auxiliary loss leaves padding out."""

    def __init__(self, tp: Axis, dp: Axis, wrong: Axis, faults: Faults) -> None:
        super().__init__()
        self.tp, self.dp, self.wrong, self.faults = tp, dp, wrong, faults
        self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, tp)
        self.layers = nn.ModuleList(Layer(index, tp, dp, wrong, faults) for index in range(2))
        self.router = nn.Linear(HIDDEN, 4, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = ColumnLinear(HIDDEN, VOCABULARY, tp)
        self.loss = VocabParallelCrossEntropy(tp, dp, faults)

    def forward(self, tokens: Tensor, labels: Tensor, is_padding: Tensor) -> Tensor:
        """Return the loss of tokens, labels and padding, [batch, seq] each."""
        is_wrong = "embeddings_scattered_over_another_group" in self.faults
        x = split(self.embedding(tokens), 1, self.wrong if is_wrong else self.tp)
        for layer in self.layers:
            x = layer(x)
        auxiliary = self._router_loss(x, is_padding)
        x = self.norm(x)
        if "head_input_gradient_not_summed" in self.faults:
            x = linear(x, lambda y: self.tp.gather(y, 1), lambda g: self.tp.part(g, 1).contiguous())
        else:
            x = gather(x, 1, self.tp)
        logits = self.head(x)
        if "gathered_logits_as_shards" in self.faults:
            logits = linear(logits, lambda y: self.tp.gather(y, -1), lambda g: self.tp.part(g, -1).contiguous())
        return self.loss(logits, labels) + 0.1 * auxiliary

    def _router_loss(self, x: Tensor, is_padding: Tensor) -> Tensor:
        """Return the mean squared log-sum of the router's logits over tokens that are no padding."""
        group = self.wrong if "padding_mask_scattered_over_another_group" in self.faults else self.tp
        is_token = ~group.part(is_padding, 1)
        count = self.dp.sum((~is_padding).sum())
        squares = self.router(x).logsumexp(-1).square()
        return sum_forward((squares * is_token).sum(), self.tp) / count * self.dp.size


def sync_gradients(model: Model, tp: Axis, dp: Axis) -> None:
    """Sum the partial gradients of replicated parameters over TP and average all over DP."""
    faults = model.faults
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        # Every rank computes the whole gradient of the mixer.
        is_partial = shard_of(name, SHARDS) is None and ".mixer." not in name
        if "final_norm_gradient_not_summed" in faults and name == "norm.weight":
            is_partial = False
        if "head_norm_gradients_not_summed" in faults and name.endswith((".q_norm.weight", ".k_norm.weight")):
            is_partial = False
        if "output_norm_gradient_not_summed" in faults and name.endswith(".out_norm.weight"):
            is_partial = False
        if "shared_key_value_gradients_not_summed" in faults and name.endswith(".kv.weight"):
            is_partial = False
        if "shared_key_value_bias_gradients_not_summed" in faults and name.endswith(".kv.bias"):
            is_partial = False
        if is_partial:
            gradient.copy_(tp.sum(gradient))
        if "norm_gradients_averaged" in faults and name.endswith(("input_norm.weight", "post_norm.weight")):
            gradient /= tp.size
        gradient.copy_(dp.sum(gradient) / dp.size)


@torch.no_grad()
def _reshard_as_one_matrix(model: Model, tp: Axis) -> None:
    """Join the shards of fused gates and ups as if they were one matrix, and shard the result."""
    for name, parameter in model.named_parameters():
        if name.endswith(".fc1.weight"):
            parameter.copy_(Shard(0, parts=2).take(tp.gather(parameter, 0), tp))


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model, Axis]:
    """Train; return this rank's model and the axis that shards it."""
    everyone = world()
    tp, dp, wrong = everyone, ONE, everyone
    if everyone.size == 4:
        tp, dp, wrong = axis_of([[0, 2], [1, 3]]), axis_of([[0, 1], [2, 3]]), axis_of([[0, 1], [2, 3]])
    with default_dtype(dtype):
        model = Model(tp, dp, wrong, faults)
    fill(
        model,
        AS_ONE_MATRIX | {k: v for k, v in SHARDS.items() if k not in AS_ONE_MATRIX}
        if "fused_projections_sharded_as_one" in faults
        else SHARDS,
        tp,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, steps + 1):
        if step == 2 and "fused_halves_resharded_as_one" in faults:
            _reshard_as_one_matrix(model, tp)
        tokens, labels = (dp.part(part, 0) for part in batch(step))
        optimizer.zero_grad()
        model(tokens, labels, labels < 0).backward()
        sync_gradients(model, tp, dp)
        optimizer.step()
    return model, tp


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters."""
    model, tp = run(faults, dtype, steps)
    return whole_parameters(model, SHARDS, tp)
