"""transformers' Llama, split by torch's own `parallelize_module`: tensor, sequence and loss parallel.

In a process group its layers are split over the ranks; without one it trains whole.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class NotSummed(RowwiseParallel):
    """A mistake: the ranks' parts of a sum are taken for the sum."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        outputs = DTensor.from_local(outputs.to_local(), device_mesh, [Replicate()], run_check=False)
        return outputs.redistribute(placements=output_layouts)


class LocalNorm(ParallelStyle):
    """A mistake: each rank's norm sees its part of the sequence, and its weight is a plain tensor that nobody sums."""

    def _apply(self, module, device_mesh):
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0].to_local(),))
        module.register_forward_hook(
            lambda _, inputs, output: DTensor.from_local(output, device_mesh, [Shard(1)], run_check=False)
        )
        return module


class LocalColumns(ParallelStyle):
    """A mistake: a split matrix is applied to a local tensor, and nobody sums what the ranks give back."""

    def _apply(self, module, device_mesh):
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.weight = nn.Parameter(weight)
        module.forward = lambda x: F.linear(x, module.weight.to_local())
        return module


def plan(layer: int, fault: str) -> dict[str, ParallelStyle]:
    """How a layer is split; its inputs and outputs are sharded along the sequence."""
    is_wrong = layer == 1
    norm, down, gate = SequenceParallel(), RowwiseParallel(output_layouts=Shard(1), use_local_output=False), None
    if is_wrong and fault == "norm gradient not summed":
        norm = LocalNorm()
    if is_wrong and fault == "output not summed":
        down = NotSummed(output_layouts=Shard(1), use_local_output=False)
    if is_wrong and fault == "input gradient not summed":
        gate = LocalColumns()
    whole = {"desired_input_layouts": (Replicate(),)}
    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "post_attention_layernorm": norm,
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), use_local_output=True, **whole),
        "mlp.gate_proj": gate or ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": down,
    }


def split(model: nn.Module, fault: str, *, is_loss_split: bool) -> None:
    """Split a model over all ranks."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if is_loss_split else Replicate(),
                use_local_output=not is_loss_split,
            ),
        },
    )
    for number, layer in enumerate(model.model.layers):
        parallelize_module(layer, mesh, plan(number, fault))
    if model.config.tie_word_embeddings and fault != "not tied":  # each module has got a parameter of its own
        model.lm_head.weight = model.model.embed_tokens.weight


def train(fault: str = "", *, is_loss_split: bool = False, is_tied: bool = False, steps: int = 2) -> None:
    """Train a few steps."""
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=is_tied,
        attn_implementation="eager",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    for norm in [it for it in model.modules() if isinstance(it, transformers.models.llama.modeling_llama.LlamaRMSNorm)]:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    if dist.is_initialized():
        split(model, fault, is_loss_split=is_loss_split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(steps):
        tokens = torch.randint(48, (4, 9), generator=torch.Generator().manual_seed(step))
        logits = model(input_ids=tokens[:, :-1], position_ids=torch.arange(8)[None]).logits
        wanted = tokens[:, 1:].flatten()
        if dist.is_initialized() and is_loss_split:
            with loss_parallel():
                loss = F.cross_entropy(logits.flatten(0, 1), wanted)
                if fault == "loss of each rank summed":
                    loss = loss * dist.get_world_size()
                loss.backward()
        else:
            F.cross_entropy(logits.flatten(0, 1), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
