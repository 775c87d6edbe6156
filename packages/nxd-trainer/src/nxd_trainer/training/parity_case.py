"""The parity case of a recipe, for `nxd parity`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from nxd_data import Batch
from torch import Tensor

from nxd_trainer.forward import compile_layers, model_inputs
from nxd_trainer.from_recipe import nxd_config, recipe_model, tokenizer_of, whole_model
from nxd_trainer.optimizers import check_is_exact, optimizer_arguments, optimizer_class, parameter_groups
from nxd_trainer.parity import ParityCase
from nxd_trainer.recipe import Recipe, load_recipe
from nxd_trainer.recipe.sections import DpoSection


def case_of_file(file: str | None, settings: Sequence[str], steps: int) -> ParityCase:
    """Call `case_of_recipe` with a recipe file, or the defaults, and `key=value` overrides; for `nxd parity`.

    Raises:
        ValueError: the recipe has mistakes, or as for `case_of_recipe`.
    """
    return case_of_recipe(load_recipe(file, settings), steps)


def case_of_recipe(recipe: Recipe, steps: int) -> ParityCase:
    """Return a recipe's case for `compare`, with random batches of its sizes and without its learning-rate schedule.

    With `train.compile` the layers of the layout are compiled; those of one process are not.

    Args:
        recipe: a recipe that `load_recipe` accepted.
        steps: number of steps to train.

    Raises:
        ValueError: `steps` is less than 1, or the recipe's model or tokenizer cannot be loaded.
    """
    if steps < 1:
        raise ValueError(f"there is nothing to compare in {steps} steps; use 1 or more (--compare-steps)")
    recipe = replace(
        recipe, data=replace(recipe.data, chat=False, packing=False), dpo=DpoSection()
    )  # the loss counts all tokens of these batches
    tokenizer, _ = tokenizer_of(recipe)
    model = recipe_model(recipe)
    config = nxd_config(recipe, model)
    optimizer, arguments = optimizer_class(recipe), optimizer_arguments(recipe)
    check_is_exact(recipe, optimizer, arguments)
    shape = (steps, recipe.train.global_batch_size, recipe.data.sequence_length + 1)
    generator = torch.Generator().manual_seed(recipe.train.seed)
    tokens = torch.randint(0, tokenizer.vocab_size, shape, generator=generator)
    return ParityCase(
        model_fn=lambda: whole_model(recipe),
        batches=[model_inputs(model.input_names, _batch_of(step)) for step in tokens],
        nxd_config=config | {"pipeline_config": config["pipeline_config"] | {"trace_file_path": None}},
        optimizer_class=optimizer,
        optimizer_arguments=arguments,
        parameter_groups=lambda model: parameter_groups(recipe, model),
        seed=recipe.train.seed,
        prepare=(lambda built: compile_layers(built, model.layer_class)) if recipe.train.compile else None,
    )


def _batch_of(tokens: Tensor) -> Batch:
    """Return tokens `[global batch, seq + 1]` as a batch, with all of them in the loss."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Batch(inputs, labels, torch.arange(inputs.shape[1]).expand_as(inputs), torch.tensor([labels.numel(), 1]))
