"""What `nxd plan` needs to know of a recipe."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nxd_plan import FixedDegrees, PlannedModel, PlannedRecipe, planned_model

from nxd_trainer.forward import DTYPES
from nxd_trainer.from_recipe import recipe_model
from nxd_trainer.recipe import Recipe, given_keys, load_recipe, recipe_to_dict

PLANNED_CHECKPOINTING = ("none", "full")
DEGREES = (
    *("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size"),
    *("expert_tensor_parallel_size", "sequence_parallel", "zero_stage"),
    *("shard_group_size", "reshard_after_forward"),
)


def recipe_to_plan(file: Path, overrides: Sequence[str] = ()) -> PlannedRecipe:
    """Return the job of a recipe; the degrees that it sets are fixed, and `nxd plan` tries the others.

    Args:
        file: the recipe.
        overrides: `key=value`, as for `load_recipe`.

    Raises:
        ValueError: the recipe has mistakes, or its model cannot be planned.
    """
    recipe = load_recipe(file, overrides)
    if recipe.model.factory is not None:
        raise ValueError(
            f"model.factory={recipe.model.factory} cannot be planned, since a plan needs a model without memory; plan "
            "a model of its sizes by model.type or model.path"
        )
    content = recipe_to_dict(recipe)
    given = given_keys(file) | {text.partition("=")[0].strip() for text in overrides}
    parallel, checkpointing = recipe.parallel, recipe.parallel.activation_checkpointing
    fixed = {name: getattr(parallel, name) for name in DEGREES if f"parallel.{name}" in given}
    if "train.gradient_accumulation_steps" in given:
        fixed["num_microbatches"] = recipe.train.gradient_accumulation_steps
    if "parallel.activation_checkpointing" in given and checkpointing in PLANNED_CHECKPOINTING:
        fixed["checkpointing"] = checkpointing
    return PlannedRecipe(
        model=_model(recipe),
        sequence_length=recipe.data.sequence_length,
        global_batch_size=recipe.train.global_batch_size,
        dtype=DTYPES[recipe.train.dtype],
        schedule=recipe.pipeline.schedule,
        fixed=FixedDegrees(**fixed),
        given=_only(content, given),
        content=content,
        not_counted=tuple(_not_counted(recipe)),
        kept=() if checkpointing in PLANNED_CHECKPOINTING else ("parallel.activation_checkpointing",),
    )


def _only(content: Mapping[str, Any], names: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return the keys of a recipe's sections that have one of these names, such as "train.steps"."""
    kept: dict[str, Any] = {}
    for key, value in content.items():
        if any(name == prefix + key or name.startswith(f"{prefix}{key}.") for name in names):
            is_section = isinstance(value, Mapping) and prefix + key not in names
            kept[key] = _only(value, names, f"{prefix}{key}.") if is_section else value
    return kept


def _model(recipe: Recipe) -> PlannedModel:
    """Return the model as it is planned from a folder, or with the vocabulary of the recipe's tokenizer."""
    not_compiled = replace(recipe, train=replace(recipe.train, compile=False))  # a login node may have no compiler
    spec = recipe_model(not_compiled)
    if recipe.model.path is not None:
        return planned_model(recipe.model.path, recipe.model.config, towers=recipe.model.use_of_towers)
    return planned_model(None, spec.description.config)


def _not_counted(recipe: Recipe) -> Iterator[str]:
    """Yield the keys whose effect on memory and time a plan does not know."""
    checkpointing = recipe.parallel.activation_checkpointing
    if checkpointing not in PLANNED_CHECKPOINTING:
        yield f"parallel.activation_checkpointing={checkpointing}"
    if recipe.parallel.activation_offload:
        yield "parallel.activation_offload=true"
    if recipe.parallel.zero_offload != "none":
        yield f"parallel.zero_offload={recipe.parallel.zero_offload}"
    if recipe.lora.rank:
        yield f"lora.rank={recipe.lora.rank}"
    if recipe.dpo.beta:
        yield f"dpo.beta={recipe.dpo.beta}"
    if recipe.train.ema_decay:
        yield f"train.ema_decay={recipe.train.ema_decay}"
    if recipe.train.autocast != "none":
        yield f"train.autocast={recipe.train.autocast}"
    if recipe.optimizer.stochastic_rounding:
        yield "optimizer.stochastic_rounding=true"
    if recipe.optimizer.factory is not None or recipe.optimizer.type != "adamw":
        yield f"optimizer={recipe.optimizer.factory or recipe.optimizer.type} (AdamW is planned)"
