"""What transformers knows about a model: its config, and how its tensors are named, fused and split in files.

Only this file of the package imports transformers. Its rules (`WeightRenaming`, `WeightConverter`) are applied to names
and shapes only, so each rank can then read just its bytes.
"""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nxd_layers.hf.transformers_models import find_no_documents_on_meta
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from nxd_engine.hugging_face.folder import check_config, with_plain_floats
from nxd_engine.hugging_face.rearrangement import Rearranged, is_rearrangement, rearrange

Shapes = Mapping[str, tuple[int, ...]]

_ROTARY_FREQUENCIES = r"rotary_emb\.inv_freq$"
_MOST_PARTS = 200_000  # modules and parameters of one model; experts of a layer share their tensors
_SDPA_WITHOUT_MASK = "sdpa_without_mask"


@dataclass(frozen=True)
class Arrangement:
    """How a model's tensors are made from a folder's.

    Attributes:
        tensors: the arrangements by the model's names.
        unexpected: names of the folder's tensors that the model does not have.
        doubled: arrangements of tied tensors that are also stored under their own names.
    """

    tensors: Mapping[str, Rearranged]
    unexpected: Sequence[str]
    doubled: Mapping[str, Rearranged]


class ReferenceModel:
    """A transformers model without memory, used for its names and rules."""

    def __init__(self, model: Any) -> None:
        """Wrap a whole, unsharded model, which may be on the meta device."""
        self._model = model
        state = model.state_dict()
        self._shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        first: dict[Any, str] = {}
        names = [(name, first.setdefault(it, name)) for name, it in model.named_parameters(remove_duplicate=False)]
        self.tied = {name: first_name for name, first_name in names if name != first_name}

    @property
    def config(self) -> Any:
        """The model's config."""
        return self._model.config

    @property
    def names(self) -> set[str]:
        """Names of the model's tensors; a tied tensor has its first name."""
        return self._shapes.keys() - self.tied.keys()

    @property
    def linear_weights(self) -> set[str]:
        """Names of the weights of the base model's linear layers, without the heads, and of its layers of experts."""
        base = self._model.base_model
        prefix = next(f"{name}." if name else "" for name, module in self._model.named_modules() if module is base)
        experts = {name for name, shape in self._shapes.items() if len(shape) == 3}
        linear = {f"{name}.weight" for name, it in self._model.named_modules() if isinstance(it, nn.Linear)}
        return {name for name in linear | experts if name.startswith(prefix)}

    def misshapen(self, arrangement: Arrangement) -> list[str]:
        """Describe each tensor whose shape in the files differs from the model's."""
        return [
            f"{name!r} has shape {list(tensor.shape)} in the files, {list(self._shapes[name])} according to the config"
            for name, tensor in arrangement.tensors.items()
            if tensor.shape != self._shapes[name]
        ]

    def arrange(self, stored: Shapes) -> Arrangement:
        """Return how the model's tensors are made from stored tensors of these names and shapes.

        A tied tensor appears once, under its first name.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - optional
        from transformers.core_model_loading import dot_natural_key  # noqa: PLC0415

        rules = get_model_conversion_mapping(self._model)
        made: dict[str, Rearranged] = {}
        fused: dict[str, tuple[Any, dict[str, list[Rearranged]]]] = {}
        unexpected = []
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = self._renamed(name, rules)
            if target not in self._shapes:
                unexpected.append(name)
            elif pattern is None:
                if target in made:
                    raise ValueError(f"{name!r} and {made[target].parts[0].source!r} are both stored for {target!r}")
                made[target] = Rearranged.whole(name, stored[name])
            else:
                converter = next(rule for rule in rules if pattern in rule.source_patterns and _converts(rule))
                _, found = fused.setdefault(target, (converter, {}))
                found.setdefault(pattern, []).append(Rearranged.whole(name, stored[name]))
        for target, (converter, found) in fused.items():
            made |= self._converted(target, converter, found)
        doubled = {name: made[name] for name, first in self.tied.items() if name in made and first in made}
        unexpected = [name for name in unexpected if not self._is_ignored(name)]
        return Arrangement(self._untied(made), unexpected, doubled)

    def stored_shapes(self) -> Shapes:
        """The names and shapes with which transformers itself would store the model."""
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - optional

        own = {name: torch.empty(self._shapes[name], device="meta") for name in self._shapes if name not in self.tied}
        return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(self._model, own).items()}

    def _is_ignored(self, name: str) -> bool:
        """Whether files may hold a tensor that the model lacks, such as one computed from the config."""
        patterns = (*(self._model._keys_to_ignore_on_load_unexpected or ()), _ROTARY_FREQUENCIES)
        return any(re.search(pattern, name) for pattern in patterns)

    def _renamed(self, name: str, rules: Sequence[Any]) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key  # noqa: PLC0415 - optional

        prefix = self._model.base_model_prefix
        renamings = [rule for rule in rules if not _converts(rule)]
        converters = [rule for rule in rules if _converts(rule)]
        target, pattern = rename_source_key(name, renamings, converters, prefix, self._shapes)
        if target not in self._shapes and name in self._shapes:
            target, pattern = rename_source_key(name, [], [], prefix, self._shapes)
        return target, pattern

    def _converted(self, target: str, rule: Any, found: dict[str, list[Rearranged]]) -> dict[str, Rearranged]:
        """Apply a rule to the tensors that its patterns match; return tensors by the model's names."""
        first, *_ = patterns = rule.target_patterns
        shapes = {pattern: self._shapes.get(target.replace(first, pattern), ()) for pattern in patterns}
        values: dict[str, list[Rearranged]] = found
        for operation in rule.operations:
            if not is_rearrangement(operation):
                source = next(iter(found.values()))[0].parts[0].source
                raise ValueError(
                    f"{target!r} is made from {source!r} by transformers' {operation}, which is not known to be a "
                    "rearrangement of tensors; load the folder with transformers, save it with "
                    "save_pretrained(..., save_original_format=False), and use the new folder"
                )
            values = rearrange(operation, rule.source_patterns, shapes, values)
        full_name = target.replace("*.", "0.")
        prefix, _, suffix = next((full_name.partition(key) for key in values if key in full_name), ("", "", ""))
        return {prefix + key + suffix: tensors[0] for key, tensors in values.items()}

    def _untied(self, made: dict[str, Rearranged]) -> dict[str, Rearranged]:
        for name, first in self.tied.items():
            tensor = made.pop(name, None)
            if tensor is not None:
                made.setdefault(first, tensor)
        return made


def reference_model(config: Mapping[str, Any]) -> ReferenceModel | None:
    """Return the model that a `config.json` describes; None if transformers is missing or does not know it."""
    model = model_on_meta(config)
    return None if model is None else ReferenceModel(model)


def model_on_meta(config: Mapping[str, Any], dtype: torch.dtype | None = None) -> Any:
    """Make the transformers model that a config describes, without memory; None as for `reference_model`.

    Args:
        config: content of a `config.json`.
        dtype: default dtype of the model's tensors; torch's default if None.

    Raises:
        ValueError: transformers rejects the config.
    """
    try:
        import transformers  # noqa: PLC0415 - optional
    except ImportError:
        return None
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    model_class: Any = getattr(transformers, name, None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        return None  # something else of transformers may have the name
    config_class: Any = getattr(model_class, "config_class", None)
    if config_class is None:
        return None
    check_config(config, config_class.attribute_map)
    content = {name: value for name, value in config.items() if name != "quantization_config"}
    default_dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or default_dtype)
        with torch.device("meta"), _of_bounded_size():
            return model_class(config_class.from_dict(with_plain_floats(content)))
    except Exception as error:  # transformers raises errors of many kinds
        raise ValueError(
            f"transformers cannot create a {model_class.__name__} from the config: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    finally:
        torch.set_default_dtype(default_dtype)


@contextmanager
def _of_bounded_size() -> Iterator[None]:
    """Raise ValueError once a model has more parts than any real one: configs have counts under many names."""
    num_parts = 0

    def count(parent: nn.Module, name: str, part: Any) -> None:
        nonlocal num_parts
        num_parts += 1
        if num_parts > _MOST_PARTS:
            raise ValueError(f"it has more than the {_MOST_PARTS:,} modules and parameters that any model has")

    hooks = [register_module_module_registration_hook(count), register_module_parameter_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def leave_out_masks(model: Any) -> None:
    """Make a model with torch's attention pass "causal" instead of a mask, also for a sliding window.

    Making a mask reads values, which a model on the meta device does not have. A model whose layers compute with the
    mask, such as one with sparse attention, still gets it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - optional

    find_no_documents_on_meta()
    if model.config._attn_implementation == "sdpa":
        make_mask = AttentionMaskInterface()["sdpa"]

        def mask_if_needed(*args: Any, allow_is_causal_skip: bool = True, **kwargs: Any) -> torch.Tensor | None:
            return None if allow_is_causal_skip else make_mask(*args, allow_is_causal_skip=False, **kwargs)

        AttentionInterface.register(_SDPA_WITHOUT_MASK, AttentionInterface()["sdpa"])
        AttentionMaskInterface.register(_SDPA_WITHOUT_MASK, mask_if_needed)
        model.set_attn_implementation(_SDPA_WITHOUT_MASK)


def with_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that names its class; the default is the causal language model of its type.

    Raises:
        ValueError: transformers is missing, or has no such model.
    """
    if config.get("architectures"):
        return dict(config)
    model_type = str(config.get("model_type"))
    if model_type not in _causal_language_models():
        raise ValueError(_unknown_type(model_type))
    return {**config, "architectures": [_causal_language_models()[model_type]]}


def full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config with all keys; unchanged if transformers does not know its type.

    Raises:
        ValueError: transformers rejects the config.
    """
    config_class = _config_class(str(config.get("model_type")))
    if config_class is None:
        return dict(config)
    check_config(config, config_class.attribute_map)
    try:
        made = config_class.from_dict(with_plain_floats(config))
    except Exception as error:  # of many kinds
        raise ValueError(f"transformers rejects the config: {type(error).__name__}: {error}") from error
    content: dict[str, Any] = json.loads(made.to_json_string(use_diff=False), parse_constant=str)
    return content


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a multimodal model's config that describes its language model, with all keys.

    The config of another model, and one of a type that transformers does not know, is returned unchanged.
    """
    has_parts = any(name.endswith("_config") and isinstance(value, Mapping) for name, value in config.items())
    config_class = _config_class(str(config.get("model_type"))) if has_parts else None
    if config_class is None:
        return config
    whole = config_class.from_dict(with_plain_floats(config))
    text = whole.get_text_config()
    content: Mapping[str, Any] = config if text is whole else text.to_dict()
    return content


def check_keys(config: Mapping[str, Any], further: Iterable[str]) -> None:
    """Raise ValueError for keys that the config's architecture does not have; the message suggests the nearest ones.

    Args:
        config: config of a model, including these keys.
        further: the keys to check.
    """
    config_class = _config_class(str(config.get("model_type")))
    if config_class is None:
        return
    default = config_class()
    _refuse_unknown(further, default.to_dict().keys() | default.attribute_map.keys(), config_class)


def _refuse_unknown(keys: Iterable[str], known: Collection[str], config_class: type, *others: str) -> None:
    mistakes = list(others)
    for name in set(keys) - set(known):
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        mistakes.append(f"model.config.{name} is not a key of {config_class.__name__}{hint}")
    if mistakes:
        raise ValueError("; ".join(sorted(mistakes)))


def config_of_type(
    model_type: str,
    sizes: Mapping[str, Any],
    further: Mapping[str, Any],
    *,
    default_sizes: Mapping[str, Any],
    end_token: int,
) -> dict[str, Any]:
    """Return the config of an architecture's causal language model with these sizes and its other defaults.

    Args:
        model_type: transformers' name of the architecture, such as "qwen3".
        sizes: sizes by their names in `LlamaConfig`, which are translated to the architecture's.
        further: additional keys, by the architecture's names.
        default_sizes: sizes that the user has not set; the architecture may lack them.
        end_token: the token that ends a text. There is no begin or padding token unless `further` has one.

    Raises:
        ValueError: transformers is not installed or has no such language model, or the architecture has no such key.
    """
    config_class = _config_class(model_type)
    if config_class is None or model_type not in _causal_language_models():
        raise ValueError(_unknown_type(model_type))
    default = config_class()
    text = default.get_text_config()
    if text is not default:
        raise ValueError(
            f"model.type={model_type} is a multimodal model without sizes of its own; use "
            f"model.type={text.model_type} for its text model"
        )
    known = default.to_dict()
    names = {**{name: name for name in known}, **default.attribute_map}
    asked_rope = {name: sizes[name] for name in ("rope_theta", "rope_scaling") if name in sizes}
    if asked_rope:
        rope = known.get("rope_parameters")
        if not isinstance(rope, Mapping) or "rope_theta" not in rope:
            raise ValueError(
                f"{model_type} has no single model.{' or '.join(asked_rope)}; set model.config.rope_parameters"
            )
        theta = {"rope_theta": sizes.get("rope_theta", rope["rope_theta"])}
        further = {"rope_parameters": {**rope, **sizes.get("rope_scaling", {}), **theta}, **further}
        sizes = {name: size for name, size in sizes.items() if name not in asked_rope}
    mistakes = [f"model.{name} is not a size of {model_type}" for name in sizes if name not in names]
    _refuse_unknown(further, names, config_class, *mistakes)
    values = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": end_token}
    values |= {names[name]: value for name, value in {**default_sizes, **sizes}.items() if name in names}
    architecture = _causal_language_models()[model_type]
    return full_config({**values, **further, "model_type": model_type, "architectures": [architecture]})


def _config_class(model_type: str) -> Any:
    """The config class of a type; None if transformers is missing or does not know it."""
    try:
        from transformers import CONFIG_MAPPING  # noqa: PLC0415 - optional

        return CONFIG_MAPPING[model_type]
    except (ImportError, KeyError):
        return None


def _causal_language_models() -> Mapping[str, str]:
    """Class names by type; empty if transformers is missing."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415
    except ImportError:
        return {}
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _unknown_type(model_type: str) -> str:
    types = _causal_language_models()
    if not types:
        return f"model.type={model_type} needs transformers, which is not installed: pip install transformers"
    nearest = difflib.get_close_matches(model_type, types, n=3)
    hint = f"did you mean {', '.join(nearest)}?" if nearest else "use a model_type as in a config.json"
    return f"model.type={model_type} is not a language model in transformers; {hint}"


def _converts(rule: Any) -> bool:
    return hasattr(rule, "operations")
