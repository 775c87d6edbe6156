"""Checks whether a recipe fits its surroundings: the files that it names, the ranks and the tokenizer.

`rules.py` checks a recipe in itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from nxd_engine.options import OptionError
from nxd_state.mesh import divisors

from nxd_trainer.recipe.rules import listed, value_of
from nxd_trainer.recipe.sections import Recipe

VOCAB_SIZE_MULTIPLE = 64
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class RecipeError(OptionError):
    """A recipe that cannot be run."""


def check_paths(recipe: Recipe) -> None:
    """Check that the files and folders that a recipe reads exist, before anything is loaded.

    Raises:
        RecipeError: a file or folder does not exist.
    """
    mistakes = []
    model = recipe.model.path
    if model is not None and not model.exists():
        mistakes.append(f"model.path={model} does not exist; give the folder of a model, with its config.json")
        if _HUB_NAME.fullmatch(str(model)):
            mistakes[-1] += f" (from a hub: `hf download {model} --local-dir {model.name}`)"
    data = recipe.data
    files = {"data.path": data.path, "data.evaluation_path": data.evaluation_path, "data.tokenizer": data.tokenizer}
    files |= {f"data.sources: {name}": Path(name) for name in data.sources or ()}
    mistakes += [
        f"{name}={path} does not exist; give a file or folder that does"
        for name, path in files.items()
        if path is not None and not path.expanduser().exists()
    ]
    if mistakes:
        raise RecipeError("recipe", mistakes)


def check_layout(recipe: Recipe, dp_size: int, *, vocab_size: int | None = None) -> None:
    """Check that the model and the batch can be split by `parallel.*` and this data-parallel size.

    Pure arithmetic, so every rank may call it and gets the same answer.

    Args:
        recipe: a recipe that `load_recipe` accepted.
        dp_size: number of data-parallel ranks.
        vocab_size: rows of the embedding, once the tokenizer is known; None uses `model.vocab_size`, and
            skips the vocabulary check if that is unset.

    Raises:
        RecipeError: a ValueError naming the sizes that are not divisible and the degrees that would work.
    """
    mistakes = [
        *_sharding_mistakes(recipe, vocab_size or recipe.model.vocab_size),
        *_batch_mistakes(recipe, dp_size),
    ]
    if mistakes:
        raise RecipeError("layout", mistakes)


def _sharding_mistakes(recipe: Recipe, vocab_size: int | None) -> Iterator[str]:
    sharded: dict[str, int] = {}
    if recipe.model.is_own_llama:  # other models pad what they can and report the rest themselves
        names = ["num_attention_heads", "hidden_size", "intermediate_size"]  # key-value heads are replicated
        sharded |= {f"model.{name}": value_of(recipe, f"model.{name}") for name in names}
    if recipe.parallel.sequence_parallel:
        sharded["data.sequence_length"] = recipe.data.sequence_length
    if vocab_size is not None and recipe.model.is_own_llama:
        sharded["model.vocab_size"] = vocab_size
    tp_size = recipe.parallel.tensor_parallel_size
    uneven = [f"{name}={size}" for name, size in sharded.items() if size % tp_size]
    if uneven:
        degrees = listed(map(str, divisors(math.gcd(*sharded.values()))))
        yield (
            f"parallel.tensor_parallel_size={tp_size} does not divide {listed(uneven, 'and')}; "
            f"use {degrees}, or change {'that size' if len(uneven) == 1 else 'those sizes'}"
        )


def _batch_mistakes(recipe: Recipe, dp_size: int) -> Iterator[str]:
    batch, accumulation = recipe.train.global_batch_size, recipe.train.gradient_accumulation_steps
    unit = accumulation * dp_size
    if batch % unit:
        multiples = [str(multiple) for multiple in (batch // unit * unit, (batch // unit + 1) * unit) if multiple]
        yield (
            f"train.global_batch_size={batch} is not a multiple of {unit}, which is "
            f"train.gradient_accumulation_steps={accumulation} x data-parallel size {dp_size}; "
            f"use {listed(multiples)}"
        )


def padded_vocab_size(recipe: Recipe, tokenizer_vocab_size: int) -> int:
    """Return the embedding's rows: `model.vocab_size`, or the tokenizer's size rounded up to a multiple of 64.

    Raises:
        RecipeError: `model.vocab_size` is smaller than the tokenizer's vocabulary.
    """
    if recipe.model.vocab_size is None:
        return -(-tokenizer_vocab_size // VOCAB_SIZE_MULTIPLE) * VOCAB_SIZE_MULTIPLE
    if recipe.model.vocab_size < tokenizer_vocab_size:
        raise RecipeError(
            "recipe",
            [
                f"model.vocab_size={recipe.model.vocab_size} is less than the tokenizer's "
                f"{tokenizer_vocab_size} ids; raise it, or leave it unset"
            ],
        )
    return recipe.model.vocab_size
