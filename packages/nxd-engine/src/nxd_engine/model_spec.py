"""A model to train: how it is made, the inputs of its forward, and its description in checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nxd_pipeline.partition import ParamInit
from nxd_state import takes_causal_lm_loss
from torch import nn

from nxd_engine.model_description import ModelDescription, describe_llama
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
    """

    make: Callable[[], nn.Module]
    description: ModelDescription
    input_names: Sequence[str] = ("input_ids", "labels")
    layer_class: type[nn.Module] | None = None
    param_init_fn: ParamInit | None = None
    aux_loss_coef: float = 0.0


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
    config.use_cache = False  # training needs no keys and values of earlier calls
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
