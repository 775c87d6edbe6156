"""Tensor parallelism by DTensors: `parallelize_module`, and layers that take DTensors' local parts, on 2 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from silent_bugs.programs.axis import ONE, Axis, gather_replicated, split, sum_backward, world
from silent_bugs.programs.megatron import Faults
from silent_bugs.programs.weights import VOCABULARY, batch, default_dtype, fill, whole_weight

RANKS = 2
HIDDEN = 8
HEADS = 4


class Attention(nn.Module):
    """Attention whose heads are sharded and share one key, which replicated weights make."""

    def __init__(self, tp: Axis, faults: Faults) -> None:
        super().__init__()
        self.tp, self.faults = tp, faults
        self.query, self.value = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.shared_key = nn.Linear(HIDDEN, HIDDEN // HEADS, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length, hidden] of [rows, length, hidden]."""
        q, v = (self._heads(part) for part in (self.query(x), self.value(x)))
        key = self.shared_key(x)
        if "shared_key_gradient_not_summed" not in self.faults:
            key = sum_backward(key, self.tp)
        scores = q @ key.unsqueeze(1).transpose(-1, -2)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)


class Experts(nn.Module):
    """Two matrices of DTensors that are multiplied as local tensors."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults
        self.mesh: DeviceMesh | None = None
        self.up, self.down = (
            nn.Parameter(torch.empty(2 * HIDDEN, HIDDEN)),
            nn.Parameter(torch.empty(HIDDEN, 2 * HIDDEN)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, length, hidden] of [rows, length, hidden]."""
        if self.mesh is None:
            return torch.tanh(x @ self.up.T) @ self.down.T
        assert isinstance(self.up, DTensor)
        assert isinstance(self.down, DTensor)
        placements = None if "expert_input_gradient_taken_for_whole" in self.faults else [Partial()]
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        local = torch.tanh(whole.to_local(grad_placements=placements) @ self.up.to_local().T) @ self.down.to_local().T
        return DTensor.from_local(local, self.mesh, [Partial()], run_check=False).full_tensor()


class PartNorm(nn.RMSNorm):
    """A norm of a rank's part of the sequence, with a weight that is a replicated DTensor."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(HIDDEN, eps=1e-6)
        self.faults = faults

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, part of length, hidden] of the same."""
        weight: Tensor = self.weight
        if isinstance(weight, DTensor):
            placements = None if "norm_weight_gradient_taken_for_whole" in self.faults else [Partial()]
            weight = weight.to_local(grad_placements=placements)
        return nn.functional.rms_norm(x, (HIDDEN,), weight, 1e-6)


class _ChunkedLoss(torch.autograd.Function):
    """A loss whose gradients are computed with it, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, compute: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    ) -> Tensor:
        loss, ctx.of_x, ctx.of_weight = compute(x)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.of_x * gradients[0], ctx.of_weight * gradients[0].item(), None


class _LogSoftmax(torch.autograd.Function):
    """A log-softmax whose gradient passes unchanged, as is right before the gradient of a negative log-likelihood."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.log_softmax(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Model(nn.Module):
    """An embedding, attention, an MLP, experts, and a head whose loss is computed in chunks."""

    def __init__(self, tp: Axis, faults: Faults) -> None:
        super().__init__()
        self.tp, self.faults = tp, faults
        self.mesh: DeviceMesh | None = None
        self.embedding, self.attention = nn.Embedding(VOCABULARY, HIDDEN), Attention(tp, faults)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.mid_norm, self.experts = nn.RMSNorm(HIDDEN, eps=1e-6), Experts(faults)
        self.norm = PartNorm(faults)
        self.gather = nn.Identity()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of tokens and labels, [rows, length] each."""
        x = self.embedding(tokens)
        x = x + self.attention(x)
        x = x + self.fc2(torch.tanh(self.fc1(x)))
        x = x + self.experts(self.mid_norm(x))
        x = self.gather(gather_replicated(self.norm(split(x, 1, self.tp)), 1, self.tp))
        return _ChunkedLoss.apply(x, self.head.weight, lambda y: self._loss(y, labels))

    @torch.enable_grad()
    def _loss(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss and its gradients, to x and to the head's weight."""
        loss, of_x, placements = x.new_zeros(()), [], None
        of_weight = torch.zeros_like(self.head.weight)
        for chunk, targets in zip(x.chunk(2, 1), labels.chunk(2, 1), strict=True):
            leaf = chunk.detach()
            if self.mesh is not None:
                leaf = DTensor.from_local(leaf, self.mesh, [Replicate()], run_check=False)
            leaf.requires_grad_()
            logits = self.head(leaf).flatten(0, 1)
            part = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / (labels >= 0).sum()
            log = (
                _LogSoftmax.apply(logits) if "log_softmax_gradient_unchanged" in self.faults else logits.log_softmax(-1)
            )
            part = part - 0.01 * log[:, :4].sum()
            scaled = part
            if "chunk_gradients_of_the_means_of_chunks" in self.faults:
                scaled = part * ((labels >= 0).sum() / (targets >= 0).sum() / 2)
            gradient, more = torch.autograd.grad(scaled, [leaf, self.head.weight])
            loss, of_weight = loss + part.detach(), of_weight + more
            if isinstance(gradient, DTensor):
                placements, gradient = gradient.placements, gradient.to_local()
            of_x.append(gradient)
        joined = torch.cat(of_x, 1)
        if self.mesh is not None and placements is not None:
            if "chunk_gradients_taken_for_whole" in self.faults:
                placements = (Replicate(),)
            joined = DTensor.from_local(joined, self.mesh, placements, run_check=False).full_tensor()
        return loss, joined, of_weight


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    """Shard the linear layers and the experts; make the norm's weight a replicated DTensor."""
    model.mesh = model.experts.mesh = mesh
    plan = {
        "attention.query": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "fc1": ColwiseParallel(),
        "fc2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for module, name, placement in (
        (model.experts, "up", Shard(0)),
        (model.experts, "down", Shard(1)),
        (model.norm, "weight", Replicate()),
    ):
        weight = distribute_tensor(module.get_parameter(name).detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(weight))


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model]:
    """Train; return this rank's model."""
    tp = world()
    with default_dtype(dtype):
        model = Model(tp, faults)
    fill(model, {}, ONE)
    if "replicas_initialized_differently" in faults and tp.rank > 0:
        weight = model.attention.shared_key.weight
        weight.data.copy_(whole_weight(f"of rank {tp.rank}", weight.shape, dtype))
    if dist.is_initialized() and tp.size > 1:
        parallelize(model, init_device_mesh("cpu", (tp.size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(*batch(step)).backward()
        optimizer.step()
    return (model,)


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters; of replicated ones this rank's copy."""
    parameters = run(faults, dtype, steps)[0].named_parameters()
    return {name: (it.full_tensor() if isinstance(it, DTensor) else it).detach() for name, it in parameters}
