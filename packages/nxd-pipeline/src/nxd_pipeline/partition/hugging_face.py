"""The structure of a Hugging Face model: its pipeline plan, its layers, embeddings and heads.

transformers is never imported: its models are recognized by their class, and asked through their public methods.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from nxd_state import find_towers, is_multimodal
from torch import nn

from nxd_pipeline.partition.cuts import LayerClasses, layer_names
from nxd_pipeline.partition.structure import ModelStructure

# What the language model of a multimodal one takes if image and sound features are in its embeddings only.
_INPUTS_OF_DECODER = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "cache_position", "logits_to_keep", "kwargs"),
}

# Inputs of forward that belong to generation, or request values that a pipeline does not keep.
_NOT_INPUTS = re.compile(
    r"cache|past_key_values|past_key_value|use_cache|cache_.*|return_dict|output_.*|layer_past|self"
)


def hugging_face_structure(model: nn.Module, transformer_layer_cls: LayerClasses | None = None) -> ModelStructure:
    """Return where a model of transformers can be cut.

    Its layers are those of `transformer_layer_cls`, or of the pipeline plan, or of its one list of blocks. Input and
    output embeddings, the plan's modules and the head go to the first or last stage; everything else is on every stage.
    Encoders of images and sounds are on the first stage if the language model gets their features in its embeddings
    only; if its layers read them as well, every stage computes them.

    Raises:
        ValueError: the list of layers cannot be determined, the model has an encoder and a decoder, or its config
            requests outputs that a pipeline does not keep.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} has an encoder and a decoder, whose layers are not one sequence; use "
            "pipeline_parallel_size=1 (with tensor parallelism), or write the stages by hand (stages=[...])"
        )
    plan = dict(getattr(model, "_pp_plan", None) or {})
    layers = _layers(model, plan, transformer_layer_cls)
    _refuse_outputs(model)
    layer_list = layers[0].rpartition(".")[0]
    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items()}
    first = {names[it] for it in [_embeddings(model, "get_input_embeddings")] if it in names}
    last = {names[it] for it in [_embeddings(model, "get_output_embeddings")] if it in names}
    for name, (inputs, _) in plan.items():
        if name != layer_list:
            (first if {"input_ids", "inputs_embeds"} & set(inputs) else last).add(name)
    base = getattr(model, "base_model", model)
    if base is not model:
        last |= {name for name, child in model.named_children() if child is not base and not _holds(child, layer_list)}
    encoders = [] if _layers_read_features(model) else find_towers(model)
    first |= modules.keys() & set(encoders)
    return ModelStructure(
        layers,
        first=frozenset(_outermost(model, first)),
        last=frozenset(_outermost(model, last - first)),
        inputs_of_first=frozenset(_inputs_of_encoders(model) if encoders else ()),
        skipped=_cross_attention_layers(model, layers),
        recorded=_recorded_routers(model, layers),
        arguments={"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {},
    )


def _layers_read_features(model: Any) -> bool:
    """Whether layers of the language model read features of an encoder, by cross-attention or deep-stack."""
    return bool(find_towers(model)) and not set(_parameters(model.get_decoder().forward)) <= _INPUTS_OF_DECODER


def _cross_attention_layers(model: Any, layers: Sequence[str]) -> frozenset[str]:
    """Return the layers that are not called if there is no image."""
    if not is_multimodal(model):
        return frozenset()
    return frozenset(layers[it] for it in getattr(model.config.get_text_config(), "cross_attention_layers", ()))


def _inputs_of_encoders(model: Any) -> list[str]:
    """Return the inputs without which a multimodal model calls none of its encoders."""
    methods = (getattr(model, f"get_{kind}_features", None) for kind in ("image", "video", "audio"))
    return [_parameters(method)[0] for method in methods if method is not None]


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def hugging_face_inputs(model: nn.Module) -> list[str]:
    """Return the inputs of the model's forward that a pipeline accepts."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [it.name for it in parameters if it.kind not in kinds and not _NOT_INPUTS.fullmatch(it.name)]


def _layers(model: nn.Module, plan: dict[str, Any], transformer_layer_cls: LayerClasses | None) -> tuple[str, ...]:
    modules = dict(model.named_modules())
    if transformer_layer_cls is not None:
        names = layer_names(model, transformer_layer_cls)
        lists = sorted({name.rpartition(".")[0] for name in names})
        if len(lists) == 1:
            return tuple(names)
        raise ValueError(
            f"{type(model).__name__} has layers of transformer_layer_cls in several places, {lists}; pass the "
            "class of the layers of one list, or write the stages by hand (stages=[...])"
        )
    planned = [name for name in plan if isinstance(modules.get(name), nn.ModuleList)]
    lists = planned or _lists_of_blocks(model)
    if len(lists) != 1:
        found = f"there are several, {lists}; pass transformer_layer_cls" if lists else "there is none"
        raise ValueError(
            f"{type(model).__name__} has no pipeline plan and no single nn.ModuleList of layers: {found}, or write "
            "the stages by hand (stages=[...])"
        )
    return tuple(f"{lists[0]}.{index}" for index in range(len(modules[lists[0]]._modules)))


def _lists_of_blocks(model: nn.Module) -> list[str]:
    """Return lists of modules that the model declares unsplittable; else lists of one class with submodules."""
    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    encoders = tuple(f"{name}." for name in find_towers(model))
    declared: list[str] = []
    alike: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module) or name.startswith(encoders):
            continue
        classes = {type(child).__name__ for child in module}
        if classes <= unsplit:
            declared.append(name)
        if len(classes) == 1 and any(module[0].children()):
            alike.append(name)
    found = declared or alike
    return [name for name in found if not any(name.startswith(f"{it}.") for it in found)]


def _refuse_outputs(model: Any) -> None:
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(model.config, name, False):
            raise ValueError(
                f"config.{name} is set, but a pipeline does not keep the outputs of its layers; set it to False"
            )


def passes_router_logits(model: Any) -> bool:
    """Whether a model with custom code returns router logits without declaring which modules compute them.

    Its layers then pass them on, which a trace follows.
    """
    is_own_code = type(model).__module__.partition(".")[0] != "transformers"
    return is_own_code and bool(getattr(model.config, "output_router_logits", False)) and _router_class(model) is None


def _router_class(model: Any) -> type[nn.Module] | None:
    """Return the class of the modules whose output is router logits, as the model declares it."""
    spec = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    if getattr(spec, "index", 0) != 0:
        return None
    return spec if isinstance(spec, type) else getattr(spec, "target_class", None)


def _recorded_routers(model: Any, layers: Sequence[str]) -> dict[str, list[str]]:
    """Return the routers of each layer whose logits the model's loss uses.

    Raises:
        ValueError: the config requests them, but the model does not declare which modules compute them.
    """
    if not getattr(model.config, "output_router_logits", False):
        return {}
    target = _router_class(model)
    if target is None:
        raise ValueError(
            f"config.output_router_logits is set, but {type(model).__name__} does not declare which modules compute "
            "them; set it to False"
        )
    found = {
        layer: [name for name, module in model.get_submodule(layer).named_modules() if isinstance(module, target)]
        for layer in layers
    }
    return {layer: names for layer, names in found.items() if names}


def _embeddings(model: Any, getter: str) -> nn.Module | None:
    try:
        return getattr(model, getter)()
    except (NotImplementedError, AttributeError):  # image and audio models have none
        return None


def _holds(module: nn.Module, path: str) -> bool:
    """Whether this module may contain the list of layers at `path`."""
    return any(isinstance(it, nn.ModuleList) and path.endswith(name) for name, it in module.named_modules() if name)


def _outermost(model: nn.Module, names: set[str]) -> set[str]:
    """Return the modules that have parameters and are not inside another one of these."""
    outer = {name for name in names if not any(name.startswith(f"{it}.") for it in names)}
    return {name for name in outer if any(True for _ in model.get_submodule(name).parameters())}
