"""The model to train, and the config of its run, made from the model and its parallel degrees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nxd_pipeline import make_schedule
from nxd_pipeline.partition import ParamInit
from nxd_state import ParallelDegrees, takes_causal_lm_loss
from torch import nn

from nxd_engine.checkpoints.model_description import ModelDescription, describe_llama
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM

# Their configs have `is_decoder`, but the models do not read it.
_ALWAYS_DECODERS = ("gpt_neox", "gpt_neox_japanese")


@dataclass(frozen=True)
class ModelSpec:
    """A model to train, before it is split over ranks.

    Attributes:
        make: a function that makes it: our Llama with its initial weights, a transformers model without memory, or
            the result of a factory.
        description: its description in checkpoints.
        input_names: the inputs of its forward in a batch.
        layer_class: the class of the layers between which a pipeline is cut; None if the model determines it.
        param_init_fn: a function that gives a model without memory its initial weights, module by module.
        aux_loss_coef: its config's coefficient of the load-balancing loss, which its own forward no longer adds.
        weights_are_loaded: whether all its weights are loaded before it is trained, so that `param_init_fn` may leave
            some unset.
        notes: lines about the model, for people.
    """

    make: Callable[[], nn.Module]
    description: ModelDescription
    input_names: Sequence[str] = ("input_ids", "labels")
    layer_class: type[nn.Module] | None = None
    param_init_fn: ParamInit | None = None
    aux_loss_coef: float = 0.0
    weights_are_loaded: bool = False
    notes: Sequence[str] = ()


def llama_spec(config: LlamaConfig, *, sequence_parallel: bool, dtype: torch.dtype) -> ModelSpec:
    """Return the spec of this package's Llama; its description has no tokenizer."""
    return ModelSpec(
        lambda: LlamaForCausalLM(config, sequence_parallel=sequence_parallel, dtype=dtype),
        describe_llama(config),
        layer_class=LlamaDecoderLayer,
    )


def transformers_spec(module: Any, description: ModelDescription, dtype: torch.dtype) -> ModelSpec:
    """Return the spec of a transformers model, which may be without memory; it is trained on `shift_labels`."""
    if not takes_causal_lm_loss(module):
        raise ValueError(
            f"{type(module).__name__} computes its loss in its own way, so it cannot take the next tokens as labels; "
            "set model.factory to a function whose model takes input_ids and labels and returns the loss"
        )
    is_decoder = getattr(module.config, "is_decoder", True) or module.config.model_type in _ALWAYS_DECODERS
    if not is_decoder:
        raise ValueError(
            f"{type(module).__name__} with is_decoder=False sees the tokens that it should predict; set "
            "model.config.is_decoder=true"
        )
    config = module.config.get_text_config()
    # Training needs no keys and values of earlier calls, with which transformers would not keep packed documents apart.
    # Some models, such as Idefics 3, read this from their own config, not from that of their language model.
    config.use_cache = False
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = False
    aux_loss_coef = 0.0
    if getattr(config, "output_router_logits", False):  # its forward sees only this rank's microbatch
        config.output_router_logits, aux_loss_coef = False, getattr(config, "router_aux_loss_coef", 0.0)
    if dtype == torch.float64:
        module.config._experts_implementation = "eager"  # the grouped matrix products of experts do not support float64
    return ModelSpec(
        lambda: module,
        description,
        input_names=("input_ids", "labels", "shift_labels"),
        param_init_fn=module._init_weights,
        aux_loss_coef=aux_loss_coef,
    )


def training_config(
    spec: ModelSpec,
    degrees: ParallelDegrees,
    *,
    num_microbatches: int,
    schedule: str = "1f1b",
    virtual_pipeline_size: int | None = None,
    activation_checkpointing: str = "none",
    max_grad_norm: float = 1.0,
    loss_scaling: bool = False,
    stochastic_rounding: bool = False,
    reshard_after_forward: bool | int | None = None,
    zero_offload: str | None = None,
) -> dict[str, Any]:
    """Return the arguments of `neuronx_distributed_config` to train a model.

    With ZeRO, weights narrower than float32 have float32 master weights, which checkpoints hold, and gradients are
    accumulated in float32.

    Args:
        spec: the model.
        degrees: the parallel degrees.
        num_microbatches: number of microbatches per step.
        schedule: name of the pipeline schedule in nxd-pipeline.
        virtual_pipeline_size: stages per rank; None for the schedule's default.
        activation_checkpointing: "none", "full", "selective", or class names separated by commas.
        max_grad_norm: the norm to clip gradients to; 0 for no clipping.
        loss_scaling: whether the loss is scaled, for float16.
        stochastic_rounding: whether bfloat16 weights are rounded stochastically, in place of master weights.
        reshard_after_forward: with ZeRO-3, see `nxd_optim.fully_shard`; None for true.
        zero_offload: with ZeRO, what is kept in host memory: "optimizer" states, also "parameters", or None.
    """
    pipeline: dict[str, Any] = {
        "num_microbatches": num_microbatches,
        "input_names": list(spec.input_names),
        "return_loss_on_cpu": False,
    }
    if spec.layer_class is not None:
        pipeline["transformer_layer_cls"] = spec.layer_class
    if degrees.pp > 1:
        played = make_schedule(schedule, degrees.pp, num_microbatches, virtual_pipeline_size=virtual_pipeline_size)
        pipeline |= {
            "auto_partition": True,
            "schedule": schedule,
            "virtual_pipeline_size": played.num_stages // played.num_ranks,
        }
    checkpointed = {"none": None, "full": "full", "selective": "selective"}
    return {
        **degrees.as_config(),
        "pipeline_config": pipeline,
        "activation_checkpoint_config": checkpointed.get(activation_checkpointing, activation_checkpointing.split(",")),
        "model_init_config": {
            "param_init_fn": spec.param_init_fn,
            "weights_are_loaded": spec.weights_are_loaded,
        },
        "optimizer_config": {
            "zero_stage": degrees.zero_stage,
            "shard_group_size": degrees.shard_group_size or None,
            "reshard_after_forward": reshard_after_forward,
            "zero_offload": zero_offload,
            "grad_clipping": max_grad_norm > 0,
            "max_grad_norm": max_grad_norm or 1.0,
        },
        "mixed_precision_config": {
            "use_master_weights_in_ckpt": degrees.zero_stage > 0 and not stochastic_rounding,
            "use_loss_scaling": loss_scaling,
            "use_stochastic_rounding": stochastic_rounding,
        },
    }
