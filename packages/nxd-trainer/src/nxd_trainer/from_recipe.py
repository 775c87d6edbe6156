"""Builds a recipe's objects: the config of the documented API, the model and its tokenizer.

`nxd train`, `nxd parity`, `nxd plan` and `nxd doctor` use this module, which makes the same calls as a script would.
`optimizers` makes the optimizer, and `training.run_data` turns text into batches.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from nxd_cli.command import import_named
from nxd_data import Tokenizer, load_tokenizer
from nxd_engine import NxDModel, initialize_parallel_model
from nxd_engine.checkpoints.merged_weights import model_on_meta_of
from nxd_engine.checkpoints.model_description import (
    BYTES,
    ModelDescription,
    describe_llama,
    describe_model,
    tokenizer_in,
)
from nxd_engine.hugging_face import check_keys, config_of_type, read_model_config, stored_shapes, text_config
from nxd_engine.models import LlamaConfig
from nxd_engine.training_config import ModelSpec, llama_spec, training_config, transformers_spec
from nxd_layers.experts import BalanceConfig, RouterLayer
from nxd_layers.hf import find_routers
from nxd_layers.hf.towers import count_parameters, freeze, leave_out
from nxd_lora import ALL_LINEAR, LoraConfig
from nxd_pipeline import Schedule, insert_communication, make_schedule, simulate
from nxd_pipeline.partition import materialize
from nxd_state import compile_backend, find_towers, is_lazy_device, is_transformers_model, seed_model_parallel
from nxd_trace.compilers.builtin import INDUCTOR, has_cpp_compiler
from torch import Tensor, nn

from nxd_trainer.dpo import REFERENCE, with_dpo_loss
from nxd_trainer.forward import DTYPES, NUM_ITEMS, compile_layers
from nxd_trainer.recipe import Recipe, padded_vocab_size
from nxd_trainer.recipe.rules import SIZES
from nxd_trainer.vision_inputs import PACKED_TEXT_TYPES, PACKED_VISION_TYPES, RecipeModel, vision_inputs_of

# Defaults of our Llama for keys that the recipe leaves to the architecture.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}

# Transformers types that attend within a document only, which starts where positions restart; a test compares each.
PACKED_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma3_text", "phi3", "glm4")
# Multimodal types that do so with text alone.
PACKED_TYPES_OF_TEXT = (
    *("aya_vision", "cohere2_vision", "gemma3", "granite4_vision", "internvl", "llava_next", "mistral3", "mllama"),
    "qwen3_vl",
)


def tokenizer_of(recipe: Recipe) -> tuple[Tokenizer, str]:
    """Return the tokenizer of a recipe's text, and its name in checkpoints.

    Raises:
        ValueError: there is no usable tokenizer.
    """
    named = recipe.data.tokenizer or tokenizer_in(recipe.model.path) or BYTES
    return load_tokenizer(None if str(named) == BYTES else named), str(named)


def recipe_model(recipe: Recipe) -> RecipeModel:
    """Determine the model that a recipe names. Does not communicate, and allocates only a factory's model.

    Raises:
        ValueError: there is no such model, it is too small for the tokenizer's ids or the sequences, or it cannot be
            trained this way.
    """
    uses_inductor = recipe.train.compile and not is_lazy_device() and compile_backend() == INDUCTOR.name
    if uses_inductor and not has_cpp_compiler():
        raise ValueError(
            "train.compile=true needs a C++ compiler, and neither g++ nor clang++ is on the PATH; install one, or "
            "leave train.compile out"
        )
    found = _recipe_model(recipe)
    model = RecipeModel(**vars(found), vision=vision_inputs_of(recipe, found))
    if recipe.dpo.beta:
        return replace(model, make=with_dpo_loss(model.make, recipe), input_names=(*model.input_names, REFERENCE))
    if not recipe.data.chat:
        return model  # microbatches count equally many tokens, so their mean loss is the mean over tokens
    names = (*model.input_names, *model.vision.names, NUM_ITEMS)
    return replace(model, input_names=(*names, _packing_input(recipe, model)) if recipe.data.packing else names)


def can_be_packed(recipe: Recipe, model: RecipeModel) -> bool:
    """Whether a recipe's model takes conversations that are packed."""
    try:
        _packing_input(recipe, model)
    except ValueError:
        return False
    return True


def _packing_input(recipe: Recipe, model: RecipeModel) -> str:
    """Return the name of the input by which a model keeps documents apart.

    Raises:
        ValueError: the model has no such input, or no test covers it.
    """
    if recipe.model.is_own_llama:
        kind = (recipe.model.rope_scaling or {}).get("rope_type")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"data.packing=true does not support model.rope_scaling.rope_type={kind}, whose frequencies depend on "
                "a document's length; leave data.packing out"
            )
        return "document_ids"
    model_type = model.description.config.get("model_type")
    if model.description.factory is None and model_type in PACKED_TYPES:
        return "position_ids"
    if model.description.factory is None and model_type in (*PACKED_TYPES_OF_TEXT, *PACKED_VISION_TYPES):
        takes_images = bool(model.vision.names)
        text_type = text_config(model.description.config).get("model_type")
        is_known = model_type in PACKED_VISION_TYPES and text_type in (*PACKED_TYPES, *PACKED_TEXT_TYPES)
        if takes_images and is_known:
            return "position_ids"
        if not takes_images and model_type in PACKED_TYPES_OF_TEXT:
            return "position_ids"
        if takes_images:
            raise ValueError(
                f"data.packing=true keeps the documents of models of type {model_type} apart in text alone; set "
                "model.towers=left_out if there are no images, or leave data.packing out"
            )
    raise ValueError(
        "data.packing=true is for our Llama and for transformers models of type "
        f"{', '.join((*PACKED_TYPES, *PACKED_VISION_TYPES))}, which are known to keep documents apart; leave it out "
        f"for {model_type or recipe.model.factory}"
    )


def _recipe_model(recipe: Recipe) -> ModelSpec:
    tokenizer, tokenizer_name = tokenizer_of(recipe)
    if recipe.model.is_own_llama:
        sizes = {name: size for name, size in _sizes(recipe).items() if size is not None}
        config = LlamaConfig(
            **_LLAMA_DEFAULTS | sizes | {"vocab_size": padded_vocab_size(recipe, tokenizer.vocab_size)}
        )
        model = llama_spec(
            config, sequence_parallel=recipe.parallel.sequence_parallel, dtype=DTYPES[recipe.train.dtype]
        )
        if recipe.parallel.pipeline_parallel_size > 1:
            model = _without_memory(recipe, config, model)
        described = describe_llama(config, tokenizer=tokenizer_name, end_token=tokenizer.end_of_document)
        return replace(model, description=described)
    if recipe.model.factory is not None:
        model = _made_by_factory(recipe, recipe.model.factory)
    else:
        model = _of_config(recipe, tokenizer)
    _check_fits(recipe, text_config(model.description.config), tokenizer)
    return replace(model, description=replace(model.description, tokenizer=tokenizer_name))


def _without_memory(recipe: Recipe, config: LlamaConfig, model: ModelSpec) -> ModelSpec:
    """Return the same Llama for a pipeline, where each rank allocates only its stages."""
    first_weights = _FirstWeights()

    def make() -> nn.Module:
        with torch.device("meta"):
            module = model.make()
        first_weights.draw_all(module)
        return module

    return replace(model, make=make, param_init_fn=first_weights)


class _FirstWeights:
    """Fills modules made on the meta device with the same initial weights as modules made with memory.

    With memory, each module draws in turn, from the random state that the previous one left. So here all modules draw
    once, one at a time, to find the state that each starts from; those on this rank's stages then draw again.
    """

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()

    def draw_all(self, model: nn.Module) -> None:
        """Find the random states, in the order in which the modules were made."""
        first_with: dict[int, nn.Module] = {}
        for module in model.modules():
            own = next(module.parameters(recurse=False), None)
            if own is not None:
                tied_to = first_with.setdefault(id(own), module)
                self._states[module] = self._states.get(tied_to, torch.get_rng_state())
                copy.deepcopy(module).to_empty(device="cpu").reset_parameters()  # type: ignore[operator]

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters of a module, which must have memory."""
        torch.set_rng_state(self._states[module])
        module.reset_parameters()  # type: ignore[operator]


def whole_model(recipe: Recipe) -> nn.Module:
    """Return a recipe's model with its initial weights before it is split over ranks; for our Llama, this rank's part.

    Seed torch as for `build_model` to get the same weights. The model is in evaluation mode, without dropout.
    """
    model = recipe_model(recipe)
    module: Any = model.make()
    if recipe.model.path is not None:
        dtype = DTYPES[recipe.train.dtype]
        module = type(module).from_pretrained(recipe.model.path, config=module.config, dtype=dtype)
    materialize(module, model.param_init_fn)
    whole: nn.Module = module.eval()
    return whole


def nxd_config(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    """Return the arguments of `neuronx_distributed_config`; see `training_config`.

    Raises:
        ValueError: the recipe's schedule cannot run.
    """
    parallel = recipe.parallel
    config = training_config(
        model,
        parallel.degrees,
        num_microbatches=recipe.train.gradient_accumulation_steps,
        schedule=recipe.pipeline.schedule,
        virtual_pipeline_size=recipe.pipeline.virtual_pipeline_size,
        activation_checkpointing=parallel.activation_checkpointing,
        max_grad_norm=recipe.train.max_grad_norm,
        loss_scaling=recipe.scales_loss,
        stochastic_rounding=recipe.optimizer.stochastic_rounding,
        reshard_after_forward=parallel.reshard_after_forward,
        zero_offload=None if parallel.zero_offload == "none" else parallel.zero_offload,
    )
    if parallel.pipeline_parallel_size > 1:
        config["pipeline_config"]["trace_file_path"] = recipe.pipeline.trace_file
    return config | {
        "activation_offload": parallel.activation_offload,
        "pad_model": parallel.pad_heads,
        "lora_config": _lora_config(recipe),
    }


def recipe_schedule(recipe: Recipe) -> Schedule:
    """Return the recipe's pipeline schedule; raises ValueError if the schedule cannot run."""
    return make_schedule(
        recipe.pipeline.schedule,
        recipe.parallel.pipeline_parallel_size,
        recipe.train.gradient_accumulation_steps,
        virtual_pipeline_size=recipe.pipeline.virtual_pipeline_size,
    )


def describe_pipeline(recipe: Recipe) -> str:
    """Describe the recipe's stages, microbatches and idle time in one line."""
    schedule = recipe_schedule(recipe)
    idle = simulate(insert_communication(schedule)).bubble_fraction
    return (
        f"pipeline: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, {schedule.name}; "
        f"{idle:.0%} idle if all stages take equally long"
    )


def build_model(recipe: Recipe, model: ModelSpec) -> NxDModel:
    """Build the model on this rank with its initial weights, which depend on the seed, not on the layout."""
    torch.manual_seed(recipe.train.seed)
    routers: dict[str, RouterLayer] = {}

    def make() -> nn.Module:
        module = model.make()
        routers.update(find_routers(module))
        return module

    built = initialize_parallel_model(nxd_config(recipe, model), make).train()
    _balance_experts(recipe, built, routers, model.aux_loss_coef)
    if recipe.train.compile:
        compile_layers(built, model.layer_class)
    seed_model_parallel(recipe.train.seed)
    return built


def _balance_experts(recipe: Recipe, model: NxDModel, routers: Mapping[str, RouterLayer], aux_loss_coef: float) -> None:
    """Count the load of a model's experts, and balance its routers as the recipe says."""
    options = recipe.moe
    config = BalanceConfig(
        aux_loss_coef=aux_loss_coef if options.aux_loss_coef is None else options.aux_loss_coef,
        aux_loss_scope=options.aux_loss_scope,
        z_loss_coef=options.z_loss_coef,
        bias_update_rate=options.bias_update_rate,
    )
    asks_for_nothing = config == BalanceConfig(aux_loss_scope=options.aux_loss_scope)
    if asks_for_nothing and (not routers or recipe.train.compile or is_lazy_device()):
        return
    if is_lazy_device():
        raise ValueError("moe.*: the routers' choices are not available on XLA; leave the keys of [moe] out")
    try:
        model.balance_experts(config, routers)
    except ValueError as error:  # the recipe's keys have the same names
        raise ValueError(f"moe.{error}") from error


def _of_config(recipe: Recipe, tokenizer: Tokenizer) -> ModelSpec:
    """Return a transformers model, by a folder's `config.json` or by type."""
    model, further = recipe.model, dict(recipe.model.config or {})
    if model.path is not None:
        config = {**read_model_config(model.path), **further}
        check_keys(config, further)
        description = ModelDescription(
            config, folder=str(model.path.resolve()), stored_shapes=stored_shapes(model.path)
        )
    else:
        sizes = _sizes(recipe)
        asked_for = {size.name: sizes[size.name] for size in SIZES if sizes[size.name] != size.default}
        asked_for["vocab_size"] = padded_vocab_size(recipe, tokenizer.vocab_size)
        description = ModelDescription(
            config_of_type(
                str(model.type),
                asked_for,
                further,
                default_sizes={name: size for name, size in sizes.items() if size is not None},
                end_token=tokenizer.end_of_document,
            )
        )
    dtype = DTYPES[recipe.train.dtype]
    on_meta = model_on_meta_of(description, dtype)
    _check_heads(on_meta, description)
    if model.path is None:
        return transformers_spec(on_meta, description, dtype)
    towers = find_towers(on_meta)
    notes = [_describe_towers(on_meta, towers, model.use_of_towers)] if towers else []
    if model.use_of_towers == "left_out":
        description = replace(description, left_out=leave_out(on_meta, towers))
    elif model.use_of_towers == "frozen":
        freeze(on_meta, towers)
    return replace(transformers_spec(on_meta, description, dtype), weights_are_loaded=True, notes=notes)


def _describe_towers(model: nn.Module, towers: Sequence[str], choice: str) -> str:
    """Say in one line what becomes of the parts of a multimodal model outside of its language model."""
    done = {"frozen": "frozen", "train": "trained", "left_out": "left out"}[choice]
    return f"towers {done}: {', '.join(towers)}, {count_parameters(model, towers):,} parameters (model.towers={choice})"


def _check_heads(model: nn.Module, description: ModelDescription) -> None:
    """Raise ValueError if a transformers model has fewer query heads than key-value heads; only a step notices."""
    if all(getattr(module, "num_key_value_groups", 1) for module in model.modules()):
        return
    of_model: Any = model.config
    config = of_model.get_text_config()
    heads, pairs = config.num_attention_heads, config.num_key_value_heads
    default = "" if "num_key_value_heads" in description.config else " (the default of transformers)"
    raise ValueError(
        f"{description.architecture} has num_attention_heads={heads} but num_key_value_heads={pairs}{default}; set "
        f"model.config.num_key_value_heads to {heads} or a divisor of it"
    )


def _sizes(recipe: Recipe) -> dict[str, Any]:
    return {size.name: getattr(recipe.model, size.name) for size in SIZES}


def _made_by_factory(recipe: Recipe, factory: str) -> ModelSpec:
    arguments = dict(recipe.model.config or {})
    make = import_named(factory, "model.factory")
    if not callable(make):
        raise ValueError(f"model.factory={factory} is a {type(make).__name__}; give a function that returns a model")
    torch.manual_seed(recipe.train.seed)
    try:
        made = make(**arguments)
    except Exception as error:  # any error of the function
        raise ValueError(
            f"model.factory={factory} failed with model.config={arguments}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"model.factory={factory} returned a {type(made).__name__}; it must return a torch module")
    description = describe_model(made, made) or ModelDescription(arguments, factory=factory)
    for parameter in made.parameters():  # buffers keep their type, such as rotary frequencies
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[recipe.train.dtype])
    if is_transformers_model(made):
        return transformers_spec(made, description, DTYPES[recipe.train.dtype])
    if recipe.data.chat and NUM_ITEMS not in inspect.signature(made.forward).parameters:
        raise ValueError(
            f"model.factory={factory} returned a {type(made).__name__} whose forward does not take {NUM_ITEMS}; with "
            "data.chat=true it must divide its sum of losses by that, since microbatches count different numbers of "
            "tokens"
        )
    layers = recipe.pipeline.layer_class
    layer_class = None if layers is None else import_named(layers, "pipeline.layer_class")
    return ModelSpec(lambda: made, description, layer_class=layer_class)


def _check_fits(recipe: Recipe, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raise ValueError if the config of the model's text shows that the tokenizer's ids or the sequences do not fit."""
    rows = config.get("vocab_size")
    positions = next((config[name] for name in ("max_position_embeddings", "n_positions") if name in config), None)
    named = next(f"model.{it}={name}" for it in ("path", "type", "factory") if (name := getattr(recipe.model, it)))
    mistakes = []
    if isinstance(rows, int) and rows < tokenizer.vocab_size:
        mistakes.append(
            f"{named} has a vocabulary of {rows}, less than the tokenizer's {tokenizer.vocab_size} ids; set "
            "data.tokenizer to the tokenizer of the model"
        )
    if isinstance(positions, int) and positions < recipe.data.sequence_length:
        mistakes.append(
            f"{named} supports {positions} positions, fewer than data.sequence_length={recipe.data.sequence_length}; "
            "lower data.sequence_length"
        )
    if mistakes:
        raise ValueError("; ".join(mistakes))


def _lora_config(recipe: Recipe) -> LoraConfig | None:
    options = recipe.lora
    if not options.rank:
        return None
    return LoraConfig(
        lora_rank=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        bias=options.bias,
        target_modules=list(options.target_modules) or (None if options.target_parameters else ALL_LINEAR),
        target_parameters=list(options.target_parameters) or None,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        modules_to_save=list(options.modules_to_save) or None,
        save_lora_base=options.save != "adapter",
        merge_lora=options.save == "merged",
    )
