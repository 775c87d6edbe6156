"""A small model under FSDP2 (`fully_shard`) with two microbatches in a step, on 2 ranks, or on 4 as 2 replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from silent_bugs.programs.axis import ONE, Axis, world
from silent_bugs.programs.megatron import Faults
from silent_bugs.programs.weights import VOCABULARY, batch, default_dtype, fill

RANKS = 2
HIDDEN = 8
MICROBATCHES = 2


class Model(nn.Module):
    """An embedding, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.fc1, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.RMSNorm(HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens [rows, length]."""
        x = self.embedding(tokens)
        x = x + torch.tanh(self.fc1(x))
        return self.head(x + torch.tanh(self.fc2(self.norm(x))))


def shard(model: Model, dp: Axis, faults: Faults) -> None:
    """Shard each layer and the rest, over all ranks, or over pairs that are replicas of one another."""
    mesh = init_device_mesh("cpu", (dp.size // 2, 2), mesh_dim_names=("replicate", "shard"))
    if dp.size == 2 or "replicas_not_averaged" in faults:
        mesh = mesh["shard"]
    reduced = torch.bfloat16 if "gradients_reduced_in_bfloat16" in faults else None
    for module in (model.fc1, model.fc2, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced))
        if "gradients_summed" in faults and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no reduction that also multiplies
            module.set_gradient_divide_factor(1.0)


def run(faults: Faults, dtype: torch.dtype, steps: int) -> tuple[Model]:
    """Train; return this rank's model."""
    dp = world()
    with default_dtype(dtype):
        model = Model()
    fill(model, {}, ONE)
    if dist.is_initialized() and dp.size > 1:
        shard(model, dp, faults)
    decays = [it for name, it in model.named_parameters() if it.ndim > 1 or "weight_decay_for_all" in faults]
    others = [it for name, it in model.named_parameters() if not (it.ndim > 1 or "weight_decay_for_all" in faults)]
    groups = [{"params": decays, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.02, eps=1e-3)
    for step in range(1, steps + 1):
        tokens, labels = (part.chunk(MICROBATCHES) for part in batch(step, rows=16))
        own = [dp.part(part, 0) for part in labels]
        count = torch.stack([(part >= 0).sum() for part in labels]).sum()
        if "mean_of_the_means_of_ranks" in faults:
            count = torch.stack([(part >= 0).sum() for part in own]).sum() * dp.size
        optimizer.zero_grad()
        for index in range(MICROBATCHES):
            logits = model(dp.part(tokens[index], 0)).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, own[index].flatten(), reduction="sum") / count
            (loss * dp.size).backward()
            if "gradients_accumulated_in_bfloat16" in faults:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad.bfloat16().to(dtype)
        optimizer.step()
    return (model,)


def train(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> None:
    """Train for some steps on the ranks of the process group, or in one process where there is none."""
    run(faults, dtype, steps)


def trained(faults: Faults = frozenset(), *, dtype: torch.dtype = torch.float64, steps: int = 2) -> dict[str, Tensor]:
    """Train and return the whole parameters."""
    parameters = run(faults, dtype, steps)[0].named_parameters()
    return {name: (it.full_tensor() if isinstance(it, DTensor) else it).detach() for name, it in parameters}
