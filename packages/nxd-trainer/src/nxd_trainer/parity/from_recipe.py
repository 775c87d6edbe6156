"""The case that a recipe describes: its model, layout, schedule and optimizer, on tokens drawn at random."""

import torch

from nxd_trainer.data import load_tokenizer
from nxd_trainer.from_recipe import model_config, nxd_config
from nxd_trainer.models import LlamaForCausalLM
from nxd_trainer.parity.case import ParityCase
from nxd_trainer.recipe import Recipe, padded_vocab_size


def case_of_recipe(recipe: Recipe, steps: int) -> ParityCase:
    """What `compare` needs of a recipe; of its batches only the sizes, and neither text nor learning-rate schedule.

    Args:
        recipe: one that `load_recipe` accepted.
        steps: to train.

    Raises:
        ValueError: there are no steps, or the recipe's tokenizer cannot be had.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps compare nothing; use 1 or more (--compare-steps)")
    vocab_size = padded_vocab_size(recipe, load_tokenizer(recipe.data.tokenizer).vocab_size)
    sizes, config = model_config(recipe, vocab_size), nxd_config(recipe)
    shape = (steps, recipe.train.global_batch_size, recipe.data.sequence_length + 1)
    tokens = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(recipe.train.seed))
    options = recipe.optimizer
    return ParityCase(
        model_fn=lambda: LlamaForCausalLM(sizes, sequence_parallel=recipe.parallel.sequence_parallel),
        batches=[{"input_ids": step[:, :-1], "labels": step[:, 1:]} for step in tokens],
        nxd_config=config | {"pipeline_config": config["pipeline_config"] | {"trace_file_path": None}},
        optimizer_arguments={
            "lr": options.lr,
            "betas": options.betas,
            "eps": options.eps,
            "weight_decay": options.weight_decay,
        },
        seed=recipe.train.seed,
    )
