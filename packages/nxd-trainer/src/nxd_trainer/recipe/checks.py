"""Which combinations of a recipe's values make sense, and which parallel layouts they fit.

Single values are checked where they are read; here are only rules over several keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from nxd_trainer.options import OptionError
from nxd_trainer.recipe.sections import Recipe

VOCAB_SIZE_MULTIPLE = 64

# Stages on each rank that a schedule of nxd-pipeline has; 0 for any number. Said again here, since that package brings
# torch in, and a recipe is checked without.
STAGES_PER_RANK = {"gpipe": 0, "1f1b": 1, "interleaved": 0, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2}


class RecipeError(OptionError):
    """A recipe that cannot be run."""


def consistency_mistakes(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    """The keys involved and the mistake line, for each rule that holds at every layout and is broken."""
    train = recipe.train
    for part, whole in (
        ("model.num_attention_heads", "model.hidden_size"),
        ("model.num_key_value_heads", "model.num_attention_heads"),
    ):
        divisor, dividend = _number(recipe, part), _number(recipe, whole)
        if dividend % divisor:
            use = _listed(map(str, divisors(dividend)))
            yield (part, whole), f"{part}={divisor} does not divide {whole}={dividend}; use {use}"
    hidden, heads = recipe.model.hidden_size, recipe.model.num_attention_heads
    if hidden % heads == 0 and hidden // heads % 2:
        mistake = (
            f"model.hidden_size={hidden} over model.num_attention_heads={heads} gives heads of size "
            f"{hidden // heads}; rotary embedding needs an even size"
        )
        yield ("model.hidden_size", "model.num_attention_heads"), mistake
    limits = [("data.sequence_length", "model.max_position_embeddings")]
    if train.stop_after is not None:
        limits.append(("train.stop_after", "train.steps"))
    for smaller, larger in limits:
        low, high = _number(recipe, smaller), _number(recipe, larger)
        if low > high:
            mistake = f"{smaller}={low} is more than {larger}={high}; lower it or raise {larger}"
            yield (smaller, larger), mistake
    if train.autocast != "none" and train.dtype != "float32":
        mistake = (
            f"train.autocast={train.autocast} needs train.dtype=float32, not {train.dtype}; "
            "set train.autocast=none or train.dtype=float32"
        )
        yield ("train.autocast", "train.dtype"), mistake
    if recipe.parallel.pipeline_parallel_size > 1:
        yield from _pipeline_mistakes(recipe)
    yield from _retention_mistakes(recipe)


def _pipeline_mistakes(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    schedule, virtual = recipe.pipeline.schedule, recipe.pipeline.virtual_pipeline_size
    needed = STAGES_PER_RANK[schedule]
    if virtual is not None and needed and virtual != needed:
        fitting = [name for name, stages in STAGES_PER_RANK.items() if stages in (0, virtual)]
        mistake = (
            f"pipeline.virtual_pipeline_size={virtual} is not for pipeline.schedule={schedule}, which has {needed}; "
            f"leave it unset, or use {_listed(fitting)}"
        )
        yield ("pipeline.virtual_pipeline_size", "pipeline.schedule"), mistake
        return
    per_rank = virtual or needed or (2 if schedule == "interleaved" else 1)
    size, layers = recipe.parallel.pipeline_parallel_size, recipe.model.num_hidden_layers
    if layers < size * per_rank:
        each = f" of {per_rank} stages each" if per_rank > 1 else ""
        mistake = (
            f"parallel.pipeline_parallel_size={size} is more than model.num_hidden_layers={layers} can fill: "
            f"{size} ranks{each} need {size * per_rank} layers; use at most {max(1, layers // per_rank)}, or add layers"
        )
        keys = ("parallel.pipeline_parallel_size", "model.num_hidden_layers", "pipeline.virtual_pipeline_size")
        yield (*keys, "pipeline.schedule"), mistake


def _retention_mistakes(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    options = recipe.checkpoint
    for name in ("checkpoint.keep_every", "checkpoint.keep_best"):
        if _number(recipe, name) and not options.keep:
            mistake = (
                f"{name}={_number(recipe, name)} adds nothing to checkpoint.keep=0, which keeps all; "
                f"set checkpoint.keep to 1 or more, or {name}=0"
            )
            yield (name, "checkpoint.keep"), mistake
    if not options.keep_best:
        return
    for name in ("train.eval_every", "data.held_out_fraction"):
        if not _number(recipe, name):
            mistake = (
                f"checkpoint.keep_best={options.keep_best} goes by the held-out loss, and {name}=0 computes none; "
                f"set {name}, or checkpoint.keep_best=0"
            )
            yield ("checkpoint.keep_best", name), mistake
    if recipe.train.eval_every and options.save_every % recipe.train.eval_every:
        mistake = (
            f"checkpoint.keep_best={options.keep_best} goes by the held-out loss, which some checkpoints would lack; "
            f"make checkpoint.save_every={options.save_every} a multiple of train.eval_every={recipe.train.eval_every}"
        )
        yield ("checkpoint.keep_best", "checkpoint.save_every", "train.eval_every"), mistake


def check_layout(recipe: Recipe, dp_size: int, *, vocab_size: int | None = None) -> None:
    """Check that the model and the batch can be cut for `parallel.*` and this data-parallel size.

    Pure arithmetic, so every rank may call it and comes to the same answer.

    Args:
        recipe: a recipe that `load_recipe` accepted.
        dp_size: data-parallel ranks.
        vocab_size: rows of the embedding once the tokenizer is known; None takes `model.vocab_size`, and
            leaves the vocabulary unchecked where that is unset.

    Raises:
        RecipeError: a ValueError naming the sizes that do not divide and the degrees that would.
    """
    mistakes = [
        *_model_mistakes(recipe, vocab_size or recipe.model.vocab_size),
        *_batch_mistakes(recipe, dp_size),
    ]
    if mistakes:
        raise RecipeError("layout", mistakes)


def _model_mistakes(recipe: Recipe, vocab_size: int | None) -> Iterator[str]:
    names = ["num_attention_heads", "hidden_size", "intermediate_size"]  # key-value heads are copied where need be
    sharded = {f"model.{name}": _number(recipe, f"model.{name}") for name in names}
    if recipe.parallel.sequence_parallel:
        sharded["data.sequence_length"] = recipe.data.sequence_length
    if vocab_size is not None:
        sharded["model.vocab_size"] = vocab_size
    tp_size = recipe.parallel.tensor_parallel_size
    uneven = [f"{name}={size}" for name, size in sharded.items() if size % tp_size]
    if uneven:
        degrees = _listed(map(str, divisors(math.gcd(*sharded.values()))))
        yield (
            f"parallel.tensor_parallel_size={tp_size} does not divide {_listed(uneven, 'and')}; "
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
            f"use {_listed(multiples)}"
        )


def padded_vocab_size(recipe: Recipe, tokenizer_vocab_size: int) -> int:
    """Rows of the embedding: `model.vocab_size`, or the tokenizer's size rounded up to a multiple of 64.

    Raises:
        RecipeError: `model.vocab_size` has no room for all the tokenizer's ids.
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


def _number(recipe: Recipe, name: str) -> int:
    section, _, field = name.partition(".")
    number: int = getattr(getattr(recipe, section), field)
    return number


def divisors(number: int) -> list[int]:
    """All numbers that divide `number`, the smallest first."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _listed(words: Iterable[str], conjunction: str = "or") -> str:
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last
