"""The case that a recipe describes: its model, layout, schedule and optimizer, on tokens drawn at random."""

import torch

from nxd_trainer.data import Batch
from nxd_trainer.from_recipe import (
    adamw_arguments,
    model_inputs,
    nxd_config,
    parameter_groups,
    recipe_model,
    tokenizer_of,
    whole_model,
)
from nxd_trainer.parity.case import ParityCase
from nxd_trainer.recipe import Recipe


def case_of_recipe(recipe: Recipe, steps: int) -> ParityCase:
    """What `compare` needs of a recipe; of its batches only the sizes, and neither text nor learning-rate schedule.

    Args:
        recipe: one that `load_recipe` accepted.
        steps: to train.

    Raises:
        ValueError: there are no steps, or the recipe's model or tokenizer cannot be had.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps compare nothing; use 1 or more (--compare-steps)")
    tokenizer, _ = tokenizer_of(recipe)
    model = recipe_model(recipe)
    config = nxd_config(recipe, model)
    shape = (steps, recipe.train.global_batch_size, recipe.data.sequence_length + 1)
    generator = torch.Generator().manual_seed(recipe.train.seed)
    tokens = torch.randint(0, tokenizer.vocab_size, shape, generator=generator)
    return ParityCase(
        model_fn=lambda: whole_model(recipe),
        batches=[
            model_inputs(model.input_names, Batch(step[:, :-1].contiguous(), step[:, 1:].contiguous()))
            for step in tokens
        ],
        nxd_config=config | {"pipeline_config": config["pipeline_config"] | {"trace_file_path": None}},
        optimizer_arguments=adamw_arguments(recipe),
        parameter_groups=lambda parameters: parameter_groups(recipe, parameters),
        seed=recipe.train.seed,
    )
