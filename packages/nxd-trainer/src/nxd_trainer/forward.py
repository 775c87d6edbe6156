"""How a recipe's model is called: its compiled layers, its inputs, and autocast."""

from collections.abc import Sequence
from typing import Any

import torch
from nxd_data import Batch
from nxd_layers.activation_checkpoint import named_transformer_layers
from nxd_pipeline import Microbatches
from nxd_state import compile_backend, get_device, is_lazy_device, keep_compiled_code_private, widest_float
from torch import nn

from nxd_trainer.dpo import REFERENCE
from nxd_trainer.recipe import Recipe
from nxd_trainer.recipe.sections import DTYPE_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}

# Transformers models divide their sum of losses by this input, or without it by the labels in the microbatch.
NUM_ITEMS = "num_items_in_batch"


def compile_layers(model: nn.Module, layer_class: type[nn.Module] | None) -> None:
    """Compile each repeated layer of a model in place, when it first runs; equal layers share compiled code.

    Shapes are static, so each batch shape is compiled separately. The layers are those of `layer_class`, or found as
    for activation checkpointing.

    Raises:
        ValueError: the device compiles whole steps, or the model has no such layers.
        PermissionError: other users could write to the compiler's cache.
    """
    if is_lazy_device():
        raise ValueError(
            "train.compile=true does not support XLA, which compiles the whole step itself; set train.compile=false"
        )
    keep_compiled_code_private()
    for layer in named_transformer_layers(model, layer_class).values():
        layer.compile(backend=compile_backend(), dynamic=False)


def model_inputs(names: Sequence[str], batch: Batch) -> dict[str, Any]:
    """Return a batch as the model's inputs, except for the outputs of a reference model.

    Labels are the next tokens; transformers models take them as `shift_labels`. Inputs for images are None in a batch
    without images.
    """
    values: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "labels": batch.labels,
        "shift_labels": batch.labels,
        "position_ids": batch.position_ids,
    }
    if "document_ids" in names:
        values["document_ids"] = (batch.position_ids == 0).cumsum(1)
    if NUM_ITEMS in names:
        learned, microbatches = batch.normalizer.to(widest_float(batch.normalizer.device)).unbind()
        values[NUM_ITEMS] = learned / microbatches
    values |= {name: Microbatches(it) if isinstance(it, list) else it for name, it in batch.images.items()}
    return {name: values.get(name) for name in names if name != REFERENCE}


def autocast(recipe: Recipe) -> torch.autocast:
    """Return the context for forward passes, with matrix products in the type of `train.autocast`."""
    # A cache would keep a bfloat16 copy of every weight until the end of the step.
    name = recipe.train.autocast
    dtype = torch.bfloat16 if name == "none" else DTYPES[name]
    return torch.autocast(get_device().type, dtype=dtype, enabled=name != "none", cache_enabled=False)
