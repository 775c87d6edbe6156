"""A model that is to be trained: how it is made, what its forward takes, and what checkpoints say of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nxd_pipeline.partition import ParamInit
from nxd_state import takes_causal_lm_loss
from torch import nn

from nxd_engine.model_description import ModelDescription, describe_llama
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM

# Their configs have `is_decoder`, which they do not read.
_ALWAYS_DECODERS = ("gpt_neox", "gpt_neox_japanese")


@dataclass(frozen=True)
class ModelSpec:
    """A model that is to be trained, not spread over ranks yet.

    Attributes:
        make: makes it: our Llama with its first weights, one of transformers without memory, or what a factory made.
        description: what checkpoints are to say of it.
        input_names: what its forward takes of a batch.
        layer_class: of the layers between which a pipeline is cut; None where the model tells.
        param_init_fn: gives a model without memory its first weights, module by module.
        aux_loss_coef: of its config, for the load-balancing loss that its own forward no longer adds.
    """

    make: Callable[[], nn.Module]
    description: ModelDescription
    input_names: Sequence[str] = ("input_ids", "labels")
    layer_class: type[nn.Module] | None = None
    param_init_fn: ParamInit | None = None
    aux_loss_coef: float = 0.0


def llama_spec(config: LlamaConfig, *, sequence_parallel: bool, dtype: torch.dtype) -> ModelSpec:
    """The Llama of this package; its description knows no tokenizer."""
    return ModelSpec(
        lambda: LlamaForCausalLM(config, sequence_parallel=sequence_parallel, dtype=dtype),
        describe_llama(config),
        layer_class=LlamaDecoderLayer,
    )


def transformers_spec(module: Any, description: ModelDescription, dtype: torch.dtype) -> ModelSpec:
    """A model of transformers, which may be without memory, as it is trained: it is told the next tokens.

    Raises:
        ValueError: it cannot be told them, or sees them.
    """
    if not takes_causal_lm_loss(module):
        raise ValueError(
            f"{type(module).__name__} computes its loss in its own way, so that it cannot be told the next tokens; "
            "give a model.factory, whose model takes input_ids and labels and returns the loss"
        )
    is_decoder = getattr(module.config, "is_decoder", True) or module.config.model_type in _ALWAYS_DECODERS
    if not is_decoder:
        raise ValueError(
            f"{type(module).__name__} with is_decoder=False sees the tokens that it is to predict; set "
            "model.config.is_decoder=true"
        )
    config = module.config.get_text_config()
    config.use_cache = False  # of what was said long ago, nothing is asked in training
    aux_loss_coef = 0.0
    if getattr(config, "output_router_logits", False):  # its forward knows this rank's microbatch alone
        config.output_router_logits, aux_loss_coef = False, getattr(config, "router_aux_loss_coef", 0.0)
    if dtype == torch.float64:
        module.config._experts_implementation = "eager"  # the grouped products of experts know no float64
    return ModelSpec(
        lambda: module,
        description,
        input_names=("input_ids", "labels", "shift_labels"),
        param_init_fn=module._init_weights,
        aux_loss_coef=aux_loss_coef,
    )
