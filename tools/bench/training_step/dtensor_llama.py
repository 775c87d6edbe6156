"""The plain Llama under torch's own tensor parallelism, by the plans of torch's documentation.

Every second linear is split by columns, the others by rows. Variants: with `loss_parallel` the logits stay split
along the vocabulary, otherwise they are gathered; with sequence parallelism what lies between is split along the
sequence.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from training_step.plain_llama import PlainLlama


class DTensorLlama(nn.Module):
    """A plain Llama, parallelized in place.

    Args:
        plain: the model, whole on every rank.
        mesh: one-dimensional.
        parallel_loss: compute the loss from logits split along the vocabulary.
        sequence_parallel: split the residual stream along the sequence.
    """

    def __init__(self, plain: PlainLlama, mesh: DeviceMesh, *, parallel_loss: bool, sequence_parallel: bool) -> None:
        super().__init__()
        self.plain = plain
        self.parallel_loss = parallel_loss
        between = Shard(1) if sequence_parallel else Replicate()
        model_plan: dict[str, ParallelStyle] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "lm_head": ColwiseParallel(
                input_layouts=between,
                output_layouts=Shard(-1) if parallel_loss else Replicate(),
                use_local_output=not parallel_loss,
            ),
        }
        layer_plan: dict[str, ParallelStyle] = {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=between),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        if sequence_parallel:
            model_plan["model.norm"] = SequenceParallel()
            layer_plan |= {
                "input_layernorm": SequenceParallel(),
                "post_attention_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
                ),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(plain, mesh, model_plan)
        for layer in plain.model.layers:
            parallelize_module(layer, mesh, layer_plan)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss; with a parallel loss call it, and its backward, in `loss_context`."""
        loss: Tensor = self.plain(input_ids, labels)
        return loss
