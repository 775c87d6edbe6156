"""What a recipe means to the documented API: its config, model and optimizer.

`nxd train` and `nxd parity` build what they run from here, with the calls that a script would make.
"""

from dataclasses import fields
from typing import Any

import torch
from nxd_pipeline import Schedule, insert_communication, make_schedule, simulate
from nxd_state import get_device, seed_model_parallel
from torch import Tensor
from torch.optim import AdamW

from nxd_trainer.api import NxDModel, NxDOptimizer, initialize_parallel_model, initialize_parallel_optimizer
from nxd_trainer.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_trainer.recipe import ModelSection, Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def nxd_config(recipe: Recipe) -> dict[str, Any]:
    """The arguments of `neuronx_distributed_config`.

    With ZeRO-1, weights narrower than float32 learn by float32 masters, which checkpoints hold, and gradients are
    accumulated in float32.

    Raises:
        ValueError: the recipe's schedule cannot be played.
    """
    parallel = recipe.parallel
    pipeline: dict[str, Any] = {
        "num_microbatches": recipe.train.gradient_accumulation_steps,
        "input_names": ["input_ids", "labels"],
        "transformer_layer_cls": LlamaDecoderLayer,
        "return_loss_on_cpu": False,
    }
    if parallel.pipeline_parallel_size > 1:
        schedule = recipe_schedule(recipe)
        pipeline |= {
            "auto_partition": True,
            "schedule": schedule,
            "virtual_pipeline_size": schedule.num_stages // schedule.num_ranks,
            "trace_file_path": recipe.pipeline.trace_file,
        }
    return {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_config": pipeline,
        "activation_checkpoint_config": None if parallel.activation_checkpointing == "none" else "full",
        "optimizer_config": {
            "zero_one_enabled": parallel.zero1,
            "grad_clipping": recipe.train.max_grad_norm > 0,
            "max_grad_norm": recipe.train.max_grad_norm or 1.0,
        },
        "mixed_precision_config": {"use_master_weights_in_ckpt": parallel.zero1},
    }


def recipe_schedule(recipe: Recipe) -> Schedule:
    """The order of the work on a pipeline's ranks.

    Raises:
        ValueError: it cannot be played.
    """
    return make_schedule(
        recipe.pipeline.schedule,
        recipe.parallel.pipeline_parallel_size,
        recipe.train.gradient_accumulation_steps,
        virtual_pipeline_size=recipe.pipeline.virtual_pipeline_size,
    )


def describe_pipeline(recipe: Recipe) -> str:
    """What becomes of the recipe's ranks and microbatches, on one line."""
    schedule = recipe_schedule(recipe)
    idle = simulate(insert_communication(schedule)).bubble_fraction
    return (
        f"pipeline: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, {schedule.name}; "
        f"{idle:.0%} idle where all stages take equally long"
    )


def model_config(recipe: Recipe, vocab_size: int) -> LlamaConfig:
    """The sizes of a recipe's model."""
    sizes = {field.name: getattr(recipe.model, field.name) for field in fields(ModelSection)}
    return LlamaConfig(**sizes | {"vocab_size": vocab_size})


def build_model(recipe: Recipe, config: LlamaConfig) -> NxDModel:
    """The model on this rank; its weights depend on the seed, not on the layout."""
    torch.manual_seed(recipe.train.seed)
    model = initialize_parallel_model(
        nxd_config(recipe),
        LlamaForCausalLM,
        config,
        sequence_parallel=recipe.parallel.sequence_parallel,
        dtype=DTYPES[recipe.train.dtype],
    )
    seed_model_parallel(recipe.train.seed)
    return model


def build_optimizer(recipe: Recipe, model: NxDModel) -> NxDOptimizer:
    """AdamW that decays matrices and leaves norms alone."""
    options = recipe.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    device = get_device()
    # On XLA the count of steps, too, is data; bias corrections that have become 1 would make another graph.
    kind: dict[str, Any] = {"capturable": True} if device.type == "xla" else {"fused": device.type in ("cpu", "cuda")}
    return initialize_parallel_optimizer(
        nxd_config(recipe), AdamW, groups, lr=options.lr, betas=options.betas, eps=options.eps, **kind
    )


def learning_rate_on(device: torch.device, rate: float) -> float | Tensor:
    """A learning rate as an optimizer takes it: on XLA as data, 0-d, so that a schedule's steps are one graph."""
    # Made as [1], since torch-xla takes the scalars 0 and 1 for constants.
    return torch.tensor([rate], device=device).view(()) if device.type == "xla" else rate


def autocast(recipe: Recipe) -> torch.autocast:
    """Around the forward passes: matrix products as `train.autocast` says."""
    # A cache would keep a bfloat16 copy of every weight from the first microbatch to the end of the step.
    enabled = recipe.train.autocast == "bfloat16"
    return torch.autocast(get_device().type, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)
