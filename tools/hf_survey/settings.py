"""Keys of configs that change what a model computes: flags, kinds and optional numbers, flipped one at a time."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_survey.architectures import tiny_config, tiny_model

_OF_NO_LAYER = re.compile(
    r"use_cache|return_dict|is_encoder_decoder|output_.*|.*token_id|problem_type|dtype|.*dropout.*|.*pdrop|layerdrop"
)
_READ_ELSEWHERE = ("tie_word_embeddings", "sliding_window")
_SHARED_HEADS = ("num_key_value_heads", "num_kv_heads")
_OPTIONAL_NUMBER = 0.5
# Values of keys whose kind does not say what else they may be; the activation has weights.
_FURTHER: dict[str, Any] = {
    **dict.fromkeys(("activation_function", "hidden_act", "hidden_activation", "mlp_hidden_act"), "xielu"),
    "activation_sparsity_pattern": [0.5] * 4,
    "num_kv_shared_layers": 2,
    "output_router_logits": True,
}


def changes_of(model_type: str) -> Iterator[dict[str, Any]]:
    """Changes of the small config of a type, each of one key that its model's code names.

    Many cannot be made: the config or the model refuses them. Many change nothing.
    """
    config_class: Any = CONFIG_MAPPING[model_type]
    values = tiny_config(model_type).to_dict()
    code = inspect.getsource(sys.modules[type(tiny_model(model_type)).__module__])
    for field in dataclasses.fields(config_class):
        named = re.search(rf"\b{field.name}\b", code) or field.name in _READ_ELSEWHERE
        if named and field.name in _FURTHER and values.get(field.name) != _FURTHER[field.name]:
            yield {field.name: _FURTHER[field.name]}
        elif named and not _OF_NO_LAYER.fullmatch(field.name):
            for value in _others(field, values.get(field.name)):
                yield {field.name: value}


def _others(field: dataclasses.Field[Any], value: Any) -> list[Any]:
    """Values of a key beside the one that it has."""
    kinds = get_args(field.type) or (field.type,)
    if isinstance(value, bool) or (value is None and bool in kinds):
        return [not value]
    if field.name in _SHARED_HEADS:
        return [1]
    if not value and float in kinds:
        return [_OPTIONAL_NUMBER]
    if isinstance(value, int) and type(None) in kinds:
        return [None]
    literals = [it for kind in (field.type, *kinds) for it in get_args(kind) if isinstance(it, str)]
    return [it for it in literals if it != value]
