"""Checks combinations of a recipe's values, and whether they fit a parallel layout.

Single values are checked where they are read; this module only has rules that involve several keys.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from nxd_engine.options import OptionError
from nxd_pipeline import TRAINING_SCHEDULES
from nxd_state.degrees import expert_tensor_parallel_mistake
from nxd_state.mesh import divisors

from nxd_trainer.recipe.sections import DataSection, ModelSection, Recipe

VOCAB_SIZE_MULTIPLE = 64
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_KEY = re.compile(r"\b[a-z]+\.[a-z_0-9]+")
_OTHER_MODELS = "choose another model by model.path or model.type"
_OBJECT_NAME = re.compile(r"[\w.]+:\w+")

# Keys that a folder or a factory determines itself.
SIZES = [field for field in fields(ModelSection) if field.name not in ("path", "type", "factory", "config")]


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


def consistency_mistakes(recipe: Recipe) -> Iterator[str]:
    """Yield an error line for each broken rule that does not depend on the layout."""
    yield from _model_mistakes(recipe)
    limits = [("data.sequence_length", "model.max_position_embeddings")] if recipe.model.has_these_sizes else []
    if recipe.train.stop_after is not None and recipe.train.epochs is None:
        limits.append(("train.stop_after", "train.steps"))
    for smaller, larger in limits:
        low, high = _value(recipe, smaller), _value(recipe, larger)
        if low > high:
            yield f"{smaller}={low} is more than {larger}={high}; lower it or raise {larger}"
    if recipe.parallel.pipeline_parallel_size > 1:
        yield from _pipeline_mistakes(recipe)
    for rules in (_train_mistakes, _parallel_mistakes, _data_mistakes, _streaming_mistakes, _dpo_mistakes):
        yield from rules(recipe)
    for rules in (_optimizer_mistakes, _lora_mistakes, _checkpoint_mistakes, _moe_mistakes):
        yield from rules(recipe)


def named_keys(mistake: str) -> set[str]:
    """Return the keys that an error line names; if one of them has a wrong value, the line says nothing new."""
    return set(_KEY.findall(mistake))


def _model_mistakes(recipe: Recipe) -> Iterator[str]:
    """Check the keys that choose the model, keys that do not apply to the chosen one, and the sizes of our Llama."""
    model, parallel = recipe.model, recipe.parallel
    chosen = [f"model.{name}" for name in ("path", "type", "factory") if getattr(model, name) is not None]
    if len(chosen) > 1:
        yield f"{_listed(chosen, 'and')} each name a model; set one of them"
        return
    sizes = [f"model.{it.name}" for it in SIZES if getattr(model, it.name) != it.default]
    if sizes and not model.has_these_sizes:
        instead = "model.config" if model.path is None else "model.config, or leave it to the folder's config.json"
        yield f"{_listed(sizes, 'and')} cannot be set: {chosen[0]} has its own sizes; use {instead}"
    for name in ("model.factory", "pipeline.layer_class"):
        given = _value(recipe, name)
        if given is not None and not _OBJECT_NAME.fullmatch(given):
            yield f"{name}={given} does not have the form module:name, such as my_models:make"
    if model.config is not None and model.is_own_llama:
        yield "model.config is for model.type, model.path or model.factory; our Llama is configured by its sizes alone"
    if model.rope_scaling is not None and not isinstance(model.rope_scaling.get("rope_type"), str):
        yield f"model.rope_scaling={dict(model.rope_scaling)} has no rope_type, such as llama3"
    etp, tp = parallel.expert_tensor_parallel_size, parallel.tensor_parallel_size
    if mistake := expert_tensor_parallel_mistake(etp, tp, prefix="parallel."):
        yield mistake
    elif parallel.degrees.splits_experts and model.is_own_llama:
        yield f"parallel.expert_parallel_size is for models with experts, and our Llama has none; {_OTHER_MODELS}"
    for name in ("parallel.pad_heads", "pipeline.layer_class"):
        if _value(recipe, name) and model.factory is None:
            yield f"{name} is for models made by model.factory; leave it out"
    if model.is_own_llama:
        yield from _llama_mistakes(recipe)


def _llama_mistakes(recipe: Recipe) -> Iterator[str]:
    for part, whole in (
        ("model.num_attention_heads", "model.hidden_size"),
        ("model.num_key_value_heads", "model.num_attention_heads"),
    ):
        divisor, dividend = _value(recipe, part), _value(recipe, whole)
        if dividend % divisor:
            use = _listed(map(str, divisors(dividend)))
            yield f"{part}={divisor} does not divide {whole}={dividend}; use {use}"
    hidden, heads = recipe.model.hidden_size, recipe.model.num_attention_heads
    if hidden % heads == 0 and hidden // heads % 2:
        yield (
            f"model.hidden_size={hidden} over model.num_attention_heads={heads} gives heads of size "
            f"{hidden // heads}; rotary embedding needs an even size"
        )


def _train_mistakes(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if train.autocast != "none" and train.dtype != "float32":
        yield (
            f"train.autocast={train.autocast} needs train.dtype=float32, not {train.dtype}; "
            "set train.autocast=none or train.dtype=float32"
        )
    if train.dtype == "float16" and not recipe.parallel.zero1:
        yield (
            "train.dtype=float16 needs parallel.zero1=true, which updates float32 master weights; set it, or use "
            "train.dtype=float32 with train.autocast=float16"
        )
    if train.gradient_histograms_every and "tensorboard" not in train.report_to:
        yield (
            f"train.gradient_histograms_every={train.gradient_histograms_every} writes to TensorBoard, which "
            "train.report_to does not list; add tensorboard to it, or set train.gradient_histograms_every=0"
        )
    yield from _held_out_loss_mistakes(recipe, "train.early_stopping_patience")


def _parallel_mistakes(recipe: Recipe) -> Iterator[str]:
    parallel = recipe.parallel
    checkpointing, name = parallel.activation_checkpointing, "parallel.activation_checkpointing"
    nearest = difflib.get_close_matches(checkpointing.lower(), ("none", "full", "selective"), cutoff=0.7)
    if nearest and checkpointing not in nearest:
        yield f"{name}={checkpointing} is unknown; did you mean {nearest[0]}?"
    if parallel.activation_offload and checkpointing == "none":
        yield f"parallel.activation_offload offloads the tensors that {name} keeps; set {name}=full"
    if parallel.activation_offload and recipe.train.compile:
        yield "parallel.activation_offload does not support compiled models; set train.compile=false"
    name = "parallel.context_parallel_size"
    if parallel.context_parallel_size > 1 and recipe.train.compile:
        yield f"{name} computes different blocks on each rank; set train.compile=false"
    if parallel.context_parallel_size > 1 and recipe.dpo.beta:
        yield f"{name} does not support dpo.beta, whose loss needs whole answers; set it to 1"


def _data_mistakes(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    origins = [f"data.{name}" for name in ("path", "sources", "dataset") if getattr(data, name) is not None]
    if len(origins) > 1:
        yield f"{_listed(origins, 'and')} each name the data; keep one of them"
    if data.column is not None and data.chat:
        yield f"data.column={data.column} is plain text, which data.chat=true does not read; set one of them"
    for name, given in (("data.column", data.column), ("data.chat", "true" if data.chat else None)):
        if given and not origins:
            yield f"{name}={given} needs data.path, a file or folder of rows"
    if data.dataset is not None and data.column is None and not data.chat:
        yield f"data.dataset={data.dataset} holds rows; set data.column to the column with text, or data.chat=true"
    if data.dataset_config is not None and data.dataset is None:
        yield "data.dataset_config needs data.dataset; set it, or leave data.dataset_config out"
    if data.packing and not data.chat:
        yield "data.packing=true is for conversations; text is always packed. Leave it out, or set data.chat=true"
    if data.chat and data.tokenizer is None and recipe.model.path is None:
        yield "data.chat=true needs data.tokenizer, a tokenizer folder with a chat template, or model.path"


def _streaming_mistakes(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    if not data.streaming:
        if data.shuffle_buffer_size != DataSection.shuffle_buffer_size:
            yield "data.shuffle_buffer_size is for data.streaming=true; other data are fully shuffled. Leave it out"
        return
    if data.column is None:
        yield "data.streaming=true reads rows of text; set data.column to the column that holds it"
    for name in ("data.chat", "data.sources", "train.epochs", "dpo.beta"):
        if _value(recipe, name):
            yield f"data.streaming=true reads an endless stream of text, which {name} does not support; leave one out"
    if data.held_out_fraction and data.evaluation_path is None:
        yield (
            f"data.streaming=true cannot hold out data.held_out_fraction={data.held_out_fraction:g}; set "
            "data.evaluation_path, or data.held_out_fraction=0"
        )


def _dpo_mistakes(recipe: Recipe) -> Iterator[str]:
    dpo, given = recipe.dpo, f"dpo.beta={recipe.dpo.beta:g}"
    if not dpo.beta:
        if dpo.label_smoothing:
            yield "dpo.label_smoothing has no effect with dpo.beta=0; set dpo.beta"
        if dpo.loss != "sigmoid":
            yield f"dpo.loss={dpo.loss} has no effect with dpo.beta=0; set dpo.beta"
        return
    if dpo.label_smoothing and dpo.loss not in ("sigmoid", "robust"):
        yield f"dpo.label_smoothing is for dpo.loss=sigmoid and robust, not {dpo.loss}; leave it out"
    if recipe.data.path is None:
        yield f"{given} needs data.path, a file of rows with prompt, chosen and rejected"
    if recipe.data.tokenizer is None and recipe.model.path is None:
        yield f"{given} needs data.tokenizer, a Hugging Face folder, or model.path"
    refused = ("data.column", "data.chat", "data.packing", "data.sources", "model.factory", "lora.modules_to_save")
    for name in refused:
        if _value(recipe, name):
            yield f"{given} does not support {name}; leave {name} out"
    if recipe.lora.rank and recipe.lora.bias != "none":
        yield f"{given} does not support lora.bias={recipe.lora.bias}, which changes the reference; set lora.bias=none"


def _optimizer_mistakes(recipe: Recipe) -> Iterator[str]:
    options, defaults = recipe.optimizer, type(recipe.optimizer)()
    changed = {name for name in vars(defaults) if getattr(options, name) != getattr(defaults, name)}
    if options.factory is not None and not _OBJECT_NAME.fullmatch(options.factory):
        yield f"optimizer.factory={options.factory} does not have the form module:name, such as torch.optim:NAdam"
    if options.factory is not None and "type" in changed:
        yield f"optimizer.type={options.type} and optimizer.factory each name an optimizer; set one of them"
    if options.stochastic_rounding and recipe.train.dtype != "bfloat16":
        yield (
            f"optimizer.stochastic_rounding=true rounds bfloat16 weights, not train.dtype={recipe.train.dtype}; set "
            "train.dtype=bfloat16, or leave it out"
        )
    for name in ("betas", "eps"):
        if name in changed and (options.type != "adamw" or options.factory is not None):
            yield f"optimizer.{name} is for optimizer.type=adamw; set the arguments of others in optimizer.config"
    for name, schedule in (
        ("num_decay_steps", "warmup_stable_decay"),
        ("decay_type", "warmup_stable_decay"),
        ("num_cycles", "cosine_with_restarts"),
        ("power", "polynomial"),
    ):
        if name in changed and options.schedule != schedule:
            yield f"optimizer.{name} is for optimizer.schedule={schedule}, not {options.schedule}; leave it out"
    warmup, decay, steps = options.warmup_steps, options.num_decay_steps, recipe.train.steps
    if decay is not None and warmup + decay > steps:
        yield (
            f"optimizer.warmup_steps={warmup} plus optimizer.num_decay_steps={decay} is more than train.steps={steps}; "
            "lower one of them"
        )


def _lora_mistakes(recipe: Recipe) -> Iterator[str]:
    lora, decay = recipe.lora, recipe.train.ema_decay
    for name in ("target_modules", "target_parameters", "modules_to_save", "use_dora"):
        if getattr(lora, name) and not lora.rank:
            yield f"lora.{name} has no effect with lora.rank=0; set lora.rank, such as 16"
    if lora.use_dora and lora.dropout:
        yield f"lora.use_dora=true does not support lora.dropout={lora.dropout}; set it to 0"
    for name, off in (("lora.dropout", "0"), ("lora.use_dora", "false")):
        if lora.target_parameters and _value(recipe, name):
            yield f"lora.target_parameters does not support {name}; set {name}={off}"
    if decay and lora.rank and lora.save == "merged":
        yield (
            f"train.ema_decay={decay:g} averages the adapter, which lora.save=merged does not save; "
            "set lora.save=adapter or both"
        )


def _checkpoint_mistakes(recipe: Recipe) -> Iterator[str]:
    options, eval_every = recipe.checkpoint, recipe.train.eval_every
    for name in ("checkpoint.keep_every", "checkpoint.keep_best"):
        if _value(recipe, name) and not options.keep:
            yield (
                f"{name}={_value(recipe, name)} has no effect with checkpoint.keep=0, which keeps all; "
                f"set checkpoint.keep to 1 or more, or {name}=0"
            )
    yield from _held_out_loss_mistakes(recipe, "checkpoint.keep_best")
    if options.keep_best and eval_every and options.save_every % eval_every:
        yield (
            f"checkpoint.keep_best={options.keep_best} needs a held-out loss, which some checkpoints would lack; "
            f"make checkpoint.save_every={options.save_every} a multiple of train.eval_every={eval_every}"
        )
    memory = f"checkpoint.memory_every={options.memory_every}"
    if options.memory_every and recipe.lora.rank and recipe.lora.save == "merged":
        yield (
            f"{memory} needs checkpoints to resume from, which lora.save=merged does not write; "
            "set lora.save=adapter or both"
        )
    if options.memory_every and options.resume == "never":
        yield f"{memory} has no effect with checkpoint.resume=never; set it to latest"


def _held_out_loss_mistakes(recipe: Recipe, name: str) -> Iterator[str]:
    """Check that there is a held-out loss if the key `name`, which needs it, is set."""
    number = _value(recipe, name)
    holds_out = recipe.data.held_out_fraction or recipe.data.evaluation_path
    for needed, is_set in (("train.eval_every", recipe.train.eval_every), ("data.held_out_fraction", holds_out)):
        if number and not is_set:
            yield (f"{name}={number} needs a held-out loss, which {needed}=0 turns off; set {needed}, or {name}=0")


def _moe_mistakes(recipe: Recipe) -> Iterator[str]:
    for name in ("moe.aux_loss_coef", "moe.z_loss_coef", "moe.bias_update_rate"):
        value = _value(recipe, name)
        if value and recipe.model.is_own_llama:
            yield f"{name}={value:g} is for models with experts; our Llama has none; {_OTHER_MODELS}"
        if value and recipe.train.compile:
            yield f"{name}={value:g} counts the routers' choices, which needs train.compile=false"


def _pipeline_mistakes(recipe: Recipe) -> Iterator[str]:
    # Imports torch, which checking a recipe without a pipeline does not need.
    from nxd_pipeline import default_stages_per_rank, stages_per_rank  # noqa: PLC0415

    schedule, virtual = recipe.pipeline.schedule, recipe.pipeline.virtual_pipeline_size
    needed = stages_per_rank(schedule)
    if virtual is not None and needed and virtual != needed:
        fitting = [name for name in TRAINING_SCHEDULES if stages_per_rank(name) in (None, virtual)]
        yield (
            f"pipeline.virtual_pipeline_size={virtual} does not fit pipeline.schedule={schedule}, which has {needed}; "
            f"leave it unset, or use {_listed(fitting)}"
        )
        return
    if not recipe.model.has_these_sizes:  # layers are counted where the model is available
        return
    per_rank = virtual or default_stages_per_rank(schedule)
    size, layers = recipe.parallel.pipeline_parallel_size, recipe.model.num_hidden_layers
    if layers < size * per_rank:
        each = f" of {per_rank} stages each" if per_rank > 1 else ""
        yield (
            f"parallel.pipeline_parallel_size={size} is more than model.num_hidden_layers={layers} can fill: "
            f"{size} ranks{each} need {size * per_rank} layers; use at most {max(1, layers // per_rank)}, or add layers"
        )


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
        sharded |= {f"model.{name}": _value(recipe, f"model.{name}") for name in names}
    if recipe.parallel.sequence_parallel:
        sharded["data.sequence_length"] = recipe.data.sequence_length
    if vocab_size is not None and recipe.model.is_own_llama:
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


def _value(recipe: Recipe, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(recipe, section), field)


def _listed(words: Iterable[str], conjunction: str = "or") -> str:
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last
