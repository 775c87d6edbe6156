"""A Llama cut into pipeline stages as a recipe says, and what it computes of a step's batches."""

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from nxd_pipeline import NxDPPModel, Schedule, insert_communication, make_schedule, simulate
from torch import Tensor

from nxd_trainer.data import Batch
from nxd_trainer.models import LlamaDecoderLayer, LlamaForCausalLM
from nxd_trainer.recipe import Recipe
from nxd_trainer.training.precision import autocast


def cut_into_stages(model: LlamaForCausalLM, recipe: Recipe) -> NxDPPModel:
    """This rank's stages of `model`, in a schedule of `train.gradient_accumulation_steps` microbatches.

    Raises:
        ValueError: the schedule cannot be played.
    """
    schedule = recipe_schedule(recipe)
    pipeline = NxDPPModel(
        model,
        LlamaDecoderLayer,
        schedule.num_microbatches,
        input_names=["input_ids", "labels"],
        auto_partition=True,
        trace_file_path=recipe.pipeline.trace_file,
        virtual_pipeline_size=schedule.num_stages // schedule.num_ranks,
        schedule=schedule,
    )
    for name, stage in pipeline.local_named_modules():
        if not name:  # the stage itself: only forward is to run in another precision, not the whole schedule
            stage.forward = autocast(recipe)(stage.forward)
    return pipeline


def train_on(pipeline: NxDPPModel, batches: Sequence[Batch]) -> Tensor | None:
    """Forward and backward of a step's microbatches; their mean loss on the rank of the last stage, else None."""
    loss = pipeline.run_train(**_inputs(batches))
    assert not isinstance(loss, list)  # that is what return_mb_loss asks for
    return loss


def evaluate_on(pipeline: NxDPPModel, batches: Iterable[Batch], num_microbatches: int) -> Tensor | None:
    """The mean loss of any number of microbatches, `num_microbatches` at a time; None as for `train_on`."""
    waiting, losses = iter(batches), []
    while group := list(islice(waiting, num_microbatches)):
        losses.append(pipeline.run_eval(**_inputs(group)))
    return None if losses[0] is None else torch.stack(losses).mean()


def describe_pipeline(recipe: Recipe) -> str:
    """What becomes of the recipe's ranks and microbatches, on one line."""
    schedule = recipe_schedule(recipe)
    idle = simulate(insert_communication(schedule)).bubble_fraction
    return (
        f"pipeline: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, {schedule.name}; "
        f"{idle:.0%} idle where all stages take equally long"
    )


def recipe_schedule(recipe: Recipe) -> Schedule:
    """The order of the work that a recipe asks for.

    Raises:
        ValueError: it cannot be played.
    """
    return make_schedule(
        recipe.pipeline.schedule,
        recipe.parallel.pipeline_parallel_size,
        recipe.train.gradient_accumulation_steps,
        virtual_pipeline_size=recipe.pipeline.virtual_pipeline_size,
    )


def _inputs(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """One batch, which the schedule cuts into these again."""
    return {
        "input_ids": torch.cat([batch.input_ids for batch in batches]),
        "labels": torch.cat([batch.labels for batch in batches]),
    }
