"""A model of transformers under FSDP2: `fully_shard` of each layer, on one mesh or as HSDP, with gradient accumulation.

In a process group each rank trains on its part of the batch; without one, one process trains on all of it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

VOCABULARY, BATCH, LENGTH, MICROBATCHES = 48, 16, 9, 2


def shard(model: nn.Module, fault: str, *, replicas: int) -> None:
    """Shard a model's layers and the rest over all ranks, in this many replicas."""
    ranks = dist.get_world_size() // replicas
    if replicas > 1:
        mesh = dist.device_mesh.init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for number, layer in enumerate(model.model.layers):
        ignored = {layer.input_layernorm.weight} if fault == "a weight ignored" and number == 1 else None
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
        if fault == "a layer not averaged" and number == 1:
            layer.set_gradient_divide_factor(1.0)
    fully_shard(model, mesh=mesh)


def tokens_of(step: int, fault: str) -> torch.Tensor:
    """A rank's sequences of a step, [sequences, LENGTH]."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    if not dist.is_initialized():
        return tokens
    rank = dist.get_rank() if fault != "equal batches" else 0
    return tokens.chunk(dist.get_world_size())[rank]


def loss_of(model: nn.Module, tokens: torch.Tensor, total: torch.Tensor, fault: str) -> torch.Tensor:
    """The sum of a microbatch's losses over the mean number of tokens that a rank has in the step."""
    wanted = labels_of(tokens)
    logits = model(input_ids=tokens[:, :-1]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
    if fault == "mean over a rank's own tokens":
        return losses / (wanted != -100).sum() / MICROBATCHES
    return losses / total


def labels_of(tokens: torch.Tensor) -> torch.Tensor:
    """The tokens to predict, without those after a token 0: prompts end there."""
    is_prompt = (tokens[:, 1:] < 12) & (tokens[:, :1] < 24)
    return tokens[:, 1:].masked_fill(is_prompt, -100)


def train(
    fault: str = "",
    *,
    model_type: str = "llama",
    replicas: int = 1,
    steps: int = 2,
) -> None:
    """Train a few steps."""
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=32,
        pad_token_id=0,
        attn_implementation="eager",
        use_cache=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    if dist.is_initialized():
        shard(model, fault, replicas=replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(steps):
        tokens = tokens_of(step, fault)
        total = (labels_of(tokens) != -100).sum()
        if dist.is_initialized():
            dist.all_reduce(total)
            total = total / dist.get_world_size()
        for microbatch in tokens.chunk(MICROBATCHES):
            loss_of(model, microbatch, total, fault).backward()
        if fault != "a weight ignored":  # the norm of sharded and of plain gradients, which torch does not mix
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
