"""The rules between a recipe's keys: which combinations of values are valid.

Single values are checked where they are read, and `checks.py` compares a recipe with files, ranks and a tokenizer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from nxd_pipeline import TRAINING_SCHEDULES
from nxd_state.degrees import expert_tensor_parallel_mistake
from nxd_state.mesh import divisors

from nxd_trainer.recipe.sections import DataSection, ModelSection, Recipe

_MODEL = ("model.path", "model.type", "model.factory")  # keys that choose the model
_OTHER_MODELS = "choose another model by model.path or model.type"
_OBJECT_NAME = re.compile(r"[\w.]+:\w+")

# Keys that a folder or a factory determines itself.
_NOT_SIZES = ("path", "type", "factory", "config", "towers")
SIZES = [field for field in fields(ModelSection) if field.name not in _NOT_SIZES]


class Mistake(NamedTuple):
    """A rule that a recipe breaks."""

    text: str
    keys: Sequence[str]  # keys whose values break the rule


def consistency_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Yield a mistake for each broken rule that does not depend on the layout.

    Rules about the number of steps wait until the steps of `train.epochs` have been counted.
    """
    yield from _model_mistakes(recipe)
    yield from _tower_mistakes(recipe)
    limits = [("data.sequence_length", "model.max_position_embeddings")] if recipe.model.has_these_sizes else []
    if recipe.train.stop_after is not None and recipe.train.epochs is None:
        limits.append(("train.stop_after", "train.steps"))
    for smaller, larger in limits:
        if value_of(recipe, smaller) > value_of(recipe, larger):
            yield _mistake(
                recipe, smaller, f"is more than {_given(recipe, larger)}; lower it or raise {larger}", larger
            )
    if recipe.parallel.pipeline_parallel_size > 1:
        yield from _pipeline_mistakes(recipe)
    for rules in (_train_mistakes, _parallel_mistakes, _data_mistakes, _streaming_mistakes, _dpo_mistakes):
        yield from rules(recipe)
    for rules in (_optimizer_mistakes, _lora_mistakes, _checkpoint_mistakes, _moe_mistakes):
        yield from rules(recipe)


def _tower_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Check what becomes of the towers of a multimodal model."""
    model = recipe.model
    if model.towers is not None and model.path is None:
        text = "is for the multimodal models of model.path"
        yield _mistake(recipe, "model.towers", text, *_MODEL)
    if model.towers == "left_out" and recipe.checkpoint.initial_weights is not None:
        text = "takes the towers from model.path; leave checkpoint.initial_weights out, or use model.towers=frozen"
        yield _mistake(recipe, "model.towers", text, "checkpoint.initial_weights")
    if model.towers == "train" and recipe.lora.rank:
        text = (
            "trains them in full beside adapters, which lora.modules_to_save does by name; name them there, or in "
            "lora.target_modules"
        )
        yield _mistake(recipe, "model.towers", text, "lora.rank")


def _model_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Check the keys that choose the model, keys that do not apply to the chosen one, and the sizes of our Llama."""
    model, parallel = recipe.model, recipe.parallel
    chosen = [name for name in _MODEL if value_of(recipe, name) is not None]
    if len(chosen) > 1:
        yield Mistake(f"{listed(chosen, 'and')} each name a model; set one of them", chosen)
        return
    sizes = [f"model.{it.name}" for it in SIZES if getattr(model, it.name) != it.default]
    if sizes and not model.has_these_sizes:
        instead = "model.config" if model.path is None else "model.config, or leave it to the folder's config.json"
        text = f"{listed(sizes, 'and')} cannot be set: {chosen[0]} has its own sizes; use {instead}"
        yield Mistake(text, [*sizes, *chosen])
    for name in ("model.factory", "pipeline.layer_class"):
        given = value_of(recipe, name)
        if given is not None and not _OBJECT_NAME.fullmatch(given):
            yield _mistake(recipe, name, "does not have the form module:name, such as my_models:make")
    if model.config is not None and model.is_own_llama:
        text = "is for model.type, model.path or model.factory; our Llama is configured by its sizes alone"
        yield _mistake(recipe, "model.config", text, *_MODEL)
    if model.rope_scaling is not None and not isinstance(model.rope_scaling.get("rope_type"), str):
        yield _mistake(recipe, "model.rope_scaling", "has no rope_type, such as llama3")
    tensor_parallel, of_experts = "parallel.tensor_parallel_size", "parallel.expert_tensor_parallel_size"
    etp, tp = parallel.expert_tensor_parallel_size, parallel.tensor_parallel_size
    if mistake := expert_tensor_parallel_mistake(etp, tp, prefix="parallel."):
        yield Mistake(mistake, (of_experts, tensor_parallel))
    elif parallel.degrees.splits_experts and model.is_own_llama:
        text = f"is for models with experts, and our Llama has none; {_OTHER_MODELS}"
        yield _mistake(recipe, "parallel.expert_parallel_size", text, tensor_parallel, of_experts, *_MODEL)
    for name in ("parallel.pad_heads", "pipeline.layer_class"):
        if value_of(recipe, name) and model.factory is None:
            yield _mistake(recipe, name, "is for models made by model.factory; leave it out", "model.factory")
    if model.is_own_llama:
        yield from _llama_mistakes(recipe)


def _llama_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    for part, whole in (
        ("model.num_attention_heads", "model.hidden_size"),
        ("model.num_key_value_heads", "model.num_attention_heads"),
    ):
        divisor, dividend = value_of(recipe, part), value_of(recipe, whole)
        if dividend % divisor:
            use = listed(map(str, divisors(dividend)))
            yield _mistake(recipe, part, f"does not divide {_given(recipe, whole)}; use {use}", whole)
    hidden, heads = recipe.model.hidden_size, recipe.model.num_attention_heads
    if hidden % heads == 0 and hidden // heads % 2:
        text = f"over model.num_attention_heads={heads} gives heads of size {hidden // heads}"
        text += "; rotary embedding needs an even size"
        yield _mistake(recipe, "model.hidden_size", text, "model.num_attention_heads")


def _train_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    train = recipe.train
    if train.autocast != "none" and train.dtype != "float32":
        text = f"needs train.dtype=float32, not {train.dtype}; set train.autocast=none or train.dtype=float32"
        yield _mistake(recipe, "train.autocast", text, "train.dtype")
    if train.dtype == "float16" and not recipe.parallel.zero_stage:
        text = "needs parallel.zero_stage=1, which has float32 master weights; set it, or use train.dtype=float32"
        yield _mistake(recipe, "train.dtype", f"{text} with train.autocast=float16", "parallel.zero_stage")
    if train.gradient_histograms_every and "tensorboard" not in train.report_to:
        name = "train.gradient_histograms_every"
        text = "writes to TensorBoard, which train.report_to does not list; add tensorboard to it"
        yield _mistake(recipe, name, f"{text}, or set {name}=0", "train.report_to")
    yield from _held_out_loss_mistakes(recipe, "train.early_stopping_patience")


def _parallel_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    parallel, compiled = recipe.parallel, recipe.train.compile
    checkpointing, name = parallel.activation_checkpointing, "parallel.activation_checkpointing"
    nearest = difflib.get_close_matches(checkpointing.lower(), ("none", "full", "selective"), cutoff=0.7)
    if nearest and checkpointing not in nearest:
        yield _mistake(recipe, name, f"is unknown; did you mean {nearest[0]}?")
    if parallel.activation_offload and checkpointing == "none":
        text = f"offloads the tensors that {name} keeps; set {name}=full"
        yield _mistake(recipe, "parallel.activation_offload", text, name)
    if parallel.activation_offload and compiled:
        text = "does not support compiled models; set train.compile=false"
        yield _mistake(recipe, "parallel.activation_offload", text, "train.compile")
    for name, stage, text in (
        ("parallel.shard_group_size", 1, "parallel.zero_stage=1 or more, which shards over the replicas"),
        ("parallel.reshard_after_forward", 3, "parallel.zero_stage=3, which shards the parameters"),
    ):
        if value_of(recipe, name) is not None and parallel.zero_stage < stage:
            yield _mistake(recipe, name, f"needs {text}", "parallel.zero_stage")
    needed = {"none": 0, "optimizer": 1, "parameters": 3}[parallel.zero_offload]
    if parallel.zero_stage < needed:
        text = f"needs parallel.zero_stage={needed}{' or more' if needed < 3 else ''}"
        yield _mistake(recipe, "parallel.zero_offload", text, "parallel.zero_stage")
    name = "parallel.context_parallel_size"
    if parallel.context_parallel_size > 1 and compiled:
        text = "computes different blocks on each rank; set train.compile=false"
        yield _mistake(recipe, name, text, "train.compile")
    if parallel.context_parallel_size > 1 and recipe.dpo.beta:
        text = "does not support dpo.beta, whose loss needs whole answers; set it to 1"
        yield _mistake(recipe, name, text, "dpo.beta")


def _data_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    data, all_origins = recipe.data, ("data.path", "data.sources", "data.dataset")
    origins = [name for name in all_origins if value_of(recipe, name) is not None]
    if len(origins) > 1:
        yield Mistake(f"{listed(origins, 'and')} each name the data; keep one of them", origins)
    if data.column is not None and data.chat:
        text = "is plain text, which data.chat=true does not read; set one of them"
        yield _mistake(recipe, "data.column", text, "data.chat")
    for name in ("data.column", "data.chat"):
        if value_of(recipe, name) and not origins:
            yield _mistake(recipe, name, "needs data.path, a file or folder of rows", *all_origins)
    if data.dataset is not None and data.column is None and not data.chat:
        text = "holds rows; set data.column to the column with text, or data.chat=true"
        yield _mistake(recipe, "data.dataset", text, "data.column", "data.chat")
    if data.dataset_config is not None and data.dataset is None:
        text = "needs data.dataset; set it, or leave data.dataset_config out"
        yield _mistake(recipe, "data.dataset_config", text, "data.dataset")
    if data.packing and not data.chat:
        text = "is for conversations; text is always packed. Leave it out, or set data.chat=true"
        yield _mistake(recipe, "data.packing", text, "data.chat")
    if data.chat and data.tokenizer is None and recipe.model.path is None:
        text = "needs data.tokenizer, a tokenizer folder with a chat template, or model.path"
        yield _mistake(recipe, "data.chat", text, "data.tokenizer", "model.path")


def _streaming_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    data, streaming = recipe.data, "data.streaming"
    if not data.streaming:
        if data.shuffle_buffer_size != DataSection.shuffle_buffer_size:
            text = "is for data.streaming=true; other data are fully shuffled. Leave it out"
            yield _mistake(recipe, "data.shuffle_buffer_size", text, streaming)
        return
    if data.column is None:
        text = "reads rows of text; set data.column to the column that holds it"
        yield _mistake(recipe, streaming, text, "data.column")
    for name in ("data.chat", "data.sources", "train.epochs", "dpo.beta"):
        if value_of(recipe, name):
            text = f"reads an endless stream of text, which {name} does not support; leave one out"
            yield _mistake(recipe, streaming, text, name)
    fraction = "data.held_out_fraction"
    if data.held_out_fraction and data.evaluation_path is None:
        text = f"cannot hold out {_given(recipe, fraction)}; set data.evaluation_path, or {fraction}=0"
        yield _mistake(recipe, streaming, text, fraction, "data.evaluation_path")


def _dpo_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    dpo, beta = recipe.dpo, "dpo.beta"
    if not dpo.beta:
        for name, is_set in (("dpo.label_smoothing", dpo.label_smoothing), ("dpo.loss", dpo.loss != "sigmoid")):
            if is_set:
                yield _mistake(recipe, name, "has no effect with dpo.beta=0; set dpo.beta", beta)
        return
    if dpo.label_smoothing and dpo.loss not in ("sigmoid", "robust"):
        text = f"is for dpo.loss=sigmoid and robust, not {dpo.loss}; leave it out"
        yield _mistake(recipe, "dpo.label_smoothing", text, "dpo.loss")
    if recipe.data.path is None:
        yield _mistake(recipe, beta, "needs data.path, a file of rows with prompt, chosen and rejected", "data.path")
    if recipe.data.tokenizer is None and recipe.model.path is None:
        text = "needs data.tokenizer, a Hugging Face folder, or model.path"
        yield _mistake(recipe, beta, text, "data.tokenizer", "model.path")
    refused = ("data.column", "data.chat", "data.packing", "data.sources", "model.factory", "lora.modules_to_save")
    for name in refused:
        if value_of(recipe, name):
            yield _mistake(recipe, beta, f"does not support {name}; leave {name} out", name)
    if recipe.lora.rank and recipe.lora.bias != "none":
        text = f"does not support {_given(recipe, 'lora.bias')}, which changes the reference; set lora.bias=none"
        yield _mistake(recipe, beta, text, "lora.rank", "lora.bias")


def _optimizer_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    options, defaults = recipe.optimizer, type(recipe.optimizer)()
    changed = {name for name in vars(defaults) if getattr(options, name) != getattr(defaults, name)}
    algorithm, factory = "optimizer.type", "optimizer.factory"
    if options.factory is not None and not _OBJECT_NAME.fullmatch(options.factory):
        yield _mistake(recipe, factory, "does not have the form module:name, such as torch.optim:NAdam")
    if options.factory is not None and "type" in changed:
        yield _mistake(recipe, algorithm, f"and {factory} each name an optimizer; set one of them", factory)
    if options.stochastic_rounding and recipe.train.dtype != "bfloat16":
        text = f"rounds bfloat16 weights, not {_given(recipe, 'train.dtype')}; set train.dtype=bfloat16"
        yield _mistake(recipe, "optimizer.stochastic_rounding", f"{text}, or leave it out", "train.dtype")
    for name in ("betas", "eps"):
        if name in changed and (options.type not in ("adamw", "muon") or options.factory is not None):
            text = "is for optimizer.type=adamw and muon; set others in optimizer.config"
            yield _mistake(recipe, f"optimizer.{name}", text, algorithm, factory)
    for name, schedule in (
        ("num_decay_steps", "warmup_stable_decay"),
        ("decay_type", "warmup_stable_decay"),
        ("num_cycles", "cosine_with_restarts"),
        ("power", "polynomial"),
    ):
        if name in changed and options.schedule != schedule:
            text = f"is for optimizer.schedule={schedule}, not {options.schedule}; leave it out"
            yield _mistake(recipe, f"optimizer.{name}", text, "optimizer.schedule")
    warmup, decay, steps = options.warmup_steps, options.num_decay_steps, recipe.train.steps
    if decay is not None and recipe.train.epochs is None and warmup + decay > steps:
        text = f"plus optimizer.num_decay_steps={decay} is more than train.steps={steps}; lower one of them"
        yield _mistake(recipe, "optimizer.warmup_steps", text, "optimizer.num_decay_steps", "train.steps")


def _lora_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    lora, decay = recipe.lora, "train.ema_decay"
    for name in ("lora.target_modules", "lora.target_parameters", "lora.modules_to_save", "lora.use_dora"):
        if value_of(recipe, name) and not lora.rank:
            yield _mistake(recipe, name, "has no effect with lora.rank=0; set lora.rank, such as 16", "lora.rank")
    if lora.use_dora and lora.dropout:
        text = f"does not support {_given(recipe, 'lora.dropout')}; set it to 0"
        yield _mistake(recipe, "lora.use_dora", text, "lora.dropout")
    for name, off in (("lora.dropout", "0"), ("lora.use_dora", "false")):
        if lora.target_parameters and value_of(recipe, name):
            yield _mistake(recipe, "lora.target_parameters", f"does not support {name}; set {name}={off}", name)
    if recipe.train.ema_decay and lora.rank and lora.save == "merged":
        text = "averages the adapter, which lora.save=merged does not save; set lora.save=adapter or both"
        yield _mistake(recipe, decay, text, "lora.rank", "lora.save")


def _checkpoint_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    options, eval_every = recipe.checkpoint, recipe.train.eval_every
    keep_best, memory_every = "checkpoint.keep_best", "checkpoint.memory_every"
    for name in ("checkpoint.keep_every", keep_best):
        if value_of(recipe, name) and not options.keep:
            text = (
                f"has no effect with checkpoint.keep=0, which keeps all; set checkpoint.keep to 1 or more, or {name}=0"
            )
            yield _mistake(recipe, name, text, "checkpoint.keep")
    yield from _held_out_loss_mistakes(recipe, keep_best)
    if options.keep_best and eval_every and options.save_every % eval_every:
        text = "needs a held-out loss, which some checkpoints would lack; make checkpoint.save_every="
        text += f"{options.save_every} a multiple of train.eval_every={eval_every}"
        yield _mistake(recipe, keep_best, text, "checkpoint.save_every", "train.eval_every")
    if options.memory_every and recipe.lora.rank and recipe.lora.save == "merged":
        text = "needs checkpoints to resume from, which lora.save=merged does not write; set lora.save=adapter or both"
        yield _mistake(recipe, memory_every, text, "lora.rank", "lora.save")
    if options.memory_every and options.resume == "never":
        text = "has no effect with checkpoint.resume=never; set it to latest"
        yield _mistake(recipe, memory_every, text, "checkpoint.resume")


def _held_out_loss_mistakes(recipe: Recipe, name: str) -> Iterator[Mistake]:
    """Check that there is a held-out loss if the key `name`, which needs it, is set."""
    holds_out = recipe.data.held_out_fraction or recipe.data.evaluation_path
    for needed, is_set in (("train.eval_every", recipe.train.eval_every), ("data.held_out_fraction", holds_out)):
        if value_of(recipe, name) and not is_set:
            text = f"needs a held-out loss, which {needed}=0 turns off; set {needed}, or {name}=0"
            yield _mistake(recipe, name, text, needed, "data.evaluation_path")


def _moe_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    for name in ("moe.aux_loss_coef", "moe.z_loss_coef", "moe.bias_update_rate"):
        if value_of(recipe, name) and recipe.model.is_own_llama:
            yield _mistake(recipe, name, f"is for models with experts; our Llama has none; {_OTHER_MODELS}", *_MODEL)
        if value_of(recipe, name) and recipe.train.compile:
            text = "counts the routers' choices, which needs train.compile=false"
            yield _mistake(recipe, name, text, "train.compile")


def _pipeline_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    # Imports torch, which checking a recipe without a pipeline does not need.
    from nxd_pipeline import default_stages_per_rank, stages_per_rank  # noqa: PLC0415

    schedule, virtual = recipe.pipeline.schedule, recipe.pipeline.virtual_pipeline_size
    needed = stages_per_rank(schedule)
    if virtual is not None and needed and virtual != needed:
        fitting = [name for name in TRAINING_SCHEDULES if stages_per_rank(name) in (None, virtual)]
        text = f"does not fit pipeline.schedule={schedule}, which has {needed}"
        text += f"; leave it unset, or use {listed(fitting)}"
        yield _mistake(recipe, "pipeline.virtual_pipeline_size", text, "pipeline.schedule")
        return
    if not recipe.model.has_these_sizes:  # layers are counted where the model is available
        return
    per_rank = virtual or default_stages_per_rank(schedule)
    size, layers = recipe.parallel.pipeline_parallel_size, recipe.model.num_hidden_layers
    if layers < size * per_rank:
        each = f" of {per_rank} stages each" if per_rank > 1 else ""
        text = (
            f"is more than model.num_hidden_layers={layers} can fill: {size} ranks{each} need {size * per_rank} layers"
        )
        text += f"; use at most {max(1, layers // per_rank)}, or add layers"
        others = ("model.num_hidden_layers", "pipeline.schedule", "pipeline.virtual_pipeline_size")
        yield _mistake(recipe, "parallel.pipeline_parallel_size", text, *others)


def _mistake(recipe: Recipe, key: str, text: str, *others: str) -> Mistake:
    """Return a mistake whose text begins with `key` and its value; `others` are further keys that the rule reads."""
    return Mistake(f"{_given(recipe, key)} {text}", (key, *others))


def _given(recipe: Recipe, name: str) -> str:
    return f"{name}={show_value(value_of(recipe, name))}"


def show_value(value: object) -> str:
    """Format a key's value as an override would write it; "unset" for None."""
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return value.as_posix() if isinstance(value, Path) else str(value)


def value_of(recipe: Recipe, name: str) -> Any:
    """Return the value of a key by its full name, such as "train.steps"."""
    section, _, field = name.partition(".")
    return getattr(getattr(recipe, section), field)


def listed(words: Iterable[str], conjunction: str = "or") -> str:
    """Return words as in a sentence: "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last
