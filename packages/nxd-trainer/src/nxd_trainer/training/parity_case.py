"""The parity case of a recipe, for `nxd parity`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from nxd_parity import ParityCase
from torch import Tensor

from nxd_trainer.data import Batch
from nxd_trainer.from_recipe import model_inputs, nxd_config, recipe_model, tokenizer_of, whole_model
from nxd_trainer.optimizers import check_is_exact, optimizer_arguments, optimizer_class, parameter_groups
from nxd_trainer.recipe import Recipe, load_recipe
from nxd_trainer.recipe.sections import DpoSection


def case_of_file(file: str | None, settings: Sequence[str], steps: int) -> ParityCase:
    """`case_of_recipe` of a recipe's file, or of the defaults, with `key=value` over what it says; for `nxd parity`.

    Raises:
        ValueError: the recipe has mistakes, or see `case_of_recipe`.
    """
    return case_of_recipe(load_recipe(file, settings), steps)


def case_of_recipe(recipe: Recipe, steps: int) -> ParityCase:
    """The case of a recipe for `compare`: of its batches only the sizes, and neither text nor learning-rate schedule.

    Args:
        recipe: one that `load_recipe` accepted.
        steps: to train.

    Raises:
        ValueError: there are no steps, or the recipe's model or tokenizer cannot be had.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps compare nothing; use 1 or more (--compare-steps)")
    recipe = replace(
        recipe, data=replace(recipe.data, chat=False, packing=False), dpo=DpoSection()
    )  # all tokens of these batches are learned
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
        parameter_groups=lambda parameters: parameter_groups(recipe, parameters),
        seed=recipe.train.seed,
    )


def _batch_of(tokens: Tensor) -> Batch:
    """Tokens `[global batch, seq + 1]`, all of them learned."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Batch(inputs, labels, torch.arange(inputs.shape[1]).expand_as(inputs), torch.tensor([labels.numel(), 1]))
