"""Adapts causal language models of transformers to the interface that planning needs; see `PlannedModel`.

They are created on the meta device, as in `nxd train`, and split by their own parallel plan. Planning measures a model
reduced to one layer of each kind. `planned_model` picks our own Llama or one of them, from a Hugging Face
`config.json`, a checkpoint, sizes given as flags, or a mix.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from nxd_engine.checkpoints.find import has_checkpoint, open_own
from nxd_engine.checkpoints.model_description import ModelDescription, description_of, rope_of
from nxd_engine.hugging_face import (
    CONFIG_FILE,
    check_keys,
    full_config,
    leave_out_masks,
    model_on_meta,
    with_architecture,
)
from nxd_engine.hugging_face.folder import read_json_object
from nxd_engine.models import LlamaConfig
from nxd_engine.training_config import ModelSpec, transformers_spec
from nxd_layers.hf import number_of_experts, parallelize, use_static_shapes
from nxd_layers.hf.supported_models import check_context_parallel
from nxd_layers.hf.towers import freeze, leave_out
from nxd_pipeline.partition import hugging_face_structure
from nxd_state import find_towers, get_tensor_model_parallel_size, splits_experts
from torch import nn

from nxd_plan.model import OwnLlama, PlannedModel, first_of_kinds, keyword_lines, numbered

Towers = Literal["frozen", "train", "left_out"]

# Config keys that do not affect the model's tensors, or that are given elsewhere.
_NOT_SAID = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "quantization_config")
_OF_TOKENIZER = ("bos_token_id", "eos_token_id", "pad_token_id")


class TransformersModel:
    """A causal language model of transformers.

    Args:
        config: content of its `config.json`, which names its class.
        folder: the folder with the initial weights; None for random weights.
        changed: config keys that differ from those in the folder.
        towers: what happens to the parts of a multimodal model outside of its language model, which sees text alone:
            "frozen", "train" or "left_out".

    Raises:
        ValueError: transformers is missing or rejects the config, or the model cannot be trained to predict the next
            token, or has no list of layers.
    """

    layer_class = None
    activation_modes = ("none", "full")

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        folder: Path | None = None,
        changed: Mapping[str, Any] | None = None,
        towers: Towers = "frozen",
    ) -> None:
        self._content = dict(config)
        self._folder = folder
        self._changed = dict(changed or {})
        self._towers = towers
        described = self._described(torch.float32)
        outline: Any = described.make()
        self._config = outline.config
        self._text_config = outline.config.get_text_config()
        layers = hugging_face_structure(outline).layers
        self.input_names = tuple(described.input_names)
        self.layers_path = layers[0].rpartition(".")[0]
        self.num_experts = number_of_experts(outline)
        self.layer_kinds = numbered([_kind_of(outline.get_submodule(name)) for name in layers])

    @property
    def max_positions(self) -> int | None:
        """See `PlannedModel`."""
        positions = getattr(self._text_config, "max_position_embeddings", None)
        return positions if isinstance(positions, int) else None

    def outline(self) -> nn.Module:
        """See `PlannedModel`."""
        return self._described(torch.float32).make()

    def on_rank(self, dtype: torch.dtype, *, sequence_parallel: bool) -> nn.Module:
        """See `PlannedModel`."""
        model: Any = self._described(dtype).make()
        _leave_layers(model, self.layers_path, first_of_kinds(self.layer_kinds))
        leave_out_masks(model)
        _do_not_look_for_padding(model)
        use_static_shapes(model)
        if get_tensor_model_parallel_size() > 1 or splits_experts():
            parallelize(model, sequence_parallel=sequence_parallel, expert_parallel=splits_experts())
        module: nn.Module = model
        return module

    def check_context(self) -> None:
        """See `PlannedModel`."""
        check_context_parallel(self.outline(), has_known_loss=True)

    def recipe_section(self) -> dict[str, Any]:
        """See `PlannedModel`: the folder with the weights; or the type, the sizes and other non-default keys.

        Raises:
            ValueError: the config has a null where its type's default is not null, or the model is multimodal.
        """
        if self._folder is not None:
            path = {"path": self._folder.as_posix()}
            use = {} if self._towers == "frozen" else {"towers": self._towers}
            return {**path, **use, "config": self._changed} if self._changed else {**path, **use}
        if self._text_config is not self._config:
            raise ValueError(
                f"model_type={self._config.model_type} is a multimodal model, which a recipe can name only by its "
                "folder; put the model's safetensors beside its config.json"
            )
        sizes = {
            size.name: value
            for size in fields(LlamaConfig)
            if size.name not in ("rope_theta", "rope_scaling")
            and (value := getattr(self._config, size.name, None)) is not None
        }
        own_names = {self._config.attribute_map.get(name, name) for name in sizes}
        said = {*own_names, *_OF_TOKENIZER}
        further = {name: value for name, value in self._not_by_default.items() if name not in said}
        nulls = [f"model.config.{name}" for name, value in further.items() if value is None]
        if nulls:
            raise ValueError(
                f"{', '.join(nulls)}: null in the config.json, which a recipe cannot express; put the model's "
                "safetensors beside its config.json, so that the recipe can name the folder"
            )
        section = {"type": self._config.model_type, **sizes}
        return {**section, "config": further} if further else section

    def spec(self, dtype: torch.dtype, *, sequence_parallel: bool) -> ModelSpec:
        """See `PlannedModel`."""
        return self._described(dtype)

    def config_lines(self, dtype_name: str) -> list[str]:
        """See `PlannedModel`; lists the config's non-default keys, and creates the model on the meta device."""
        is_multimodal = self._text_config is not self._config
        values = keyword_lines({**self._not_by_default, **({} if is_multimodal else {"use_cache": False})})
        auto_class = "AutoModelForImageTextToText" if is_multimodal else "AutoModelForCausalLM"
        lines = [
            f"config = {type(self._config).__name__}({values})",
            'with torch.device("meta"):',
            f"    outline = {auto_class}.from_config(config, dtype=torch.{dtype_name})",
        ]
        if self._towers != "frozen":
            return lines
        outline = self.outline()
        single = dict(outline.named_parameters())
        getters = {path: "parameter" if path in single else "submodule" for path in find_towers(outline)}
        return [*lines, *(f'outline.get_{kind}("{path}").requires_grad_(False)' for path, kind in getters.items())]

    def model_arguments(self, dtype_name: str, *, sequence_parallel: bool) -> list[str]:
        """See `PlannedModel`."""
        return ["lambda: outline"]

    @cached_property
    def _not_by_default(self) -> dict[str, Any]:
        """The smallest set of keys that reproduces the config."""
        kind = {"model_type": self._config.model_type}
        whole, default = full_config(self._content), full_config(kind)
        needed = {
            name: value
            for name, value in whole.items()
            if name not in _NOT_SAID and not name.startswith("_") and (name not in default or default[name] != value)
        }
        for name in list(needed):  # some follow from others, such as the layer types from the number of layers
            rest = {key: value for key, value in needed.items() if key != name}
            if _makes({**kind, **rest}, whole):
                needed = rest
        return needed

    def _described(self, dtype: torch.dtype) -> ModelSpec:
        made = model_on_meta(self._content, dtype)
        if made is None:
            raise ValueError(
                f"model_type={self._content.get('model_type')!r} needs transformers, which is not installed or does "
                f"not know {self._content.get('architectures')} (pip install transformers)"
            )
        if self._towers == "left_out":
            leave_out(made, find_towers(made))
        elif self._towers == "frozen":
            freeze(made, find_towers(made))
        return transformers_spec(made, ModelDescription(self._content), dtype)


def _kind_of(layer: nn.Module) -> tuple[Any, ...]:
    return type(layer), *((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


def _do_not_look_for_padding(model: nn.Module) -> None:
    """Leave out a warning for whose sake a model reads its tokens, which have no values here."""
    for part in model.modules():
        if hasattr(part, "warn_if_padding_and_no_attention_mask"):
            part.warn_if_padding_and_no_attention_mask = lambda *_: None  # type: ignore[assignment]


def _leave_layers(model: Any, path: str, places: list[int]) -> None:
    """Keep only some of a model's layers, and only their entries in its config."""
    layers = model.get_submodule(path)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.ModuleList([layers[place] for place in places]))
    config = model.config.get_text_config()
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == len(layers):
            setattr(config, key, [value[place] for place in places])
    if not getattr(config, "hidden_size_per_layer_input", 0):  # else an embedding holds a part for each layer
        config.num_hidden_layers = len(places)


def _makes(content: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Whether transformers reproduces a whole config from some of its keys."""
    try:
        made = full_config(content)
    except ValueError:
        return False
    return all(made.get(name) == value for name, value in whole.items() if name not in _NOT_SAID)


LLAMA_TYPES = ("llama", "mistral")  # they have the same tensors
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def planned_model(
    file: str | Path | None = None, sizes: Mapping[str, Any] | None = None, *, towers: Towers = "frozen"
) -> PlannedModel:
    """Return the model that a file describes: our own Llama if it matches, else a transformers model.

    Args:
        file: a Hugging Face `config.json`, the folder that contains it, or a folder of checkpoints, of which the newest
            is used.
        sizes: config keys that override those of the file; None counts as not given. Without a file, the model is a
            Llama and all required sizes must be given.
        towers: see `TransformersModel`.

    Raises:
        ValueError: the file cannot be read, sizes are missing or not numbers, or the model cannot be trained.
        nxd_ckpt.CheckpointError: the checkpoint is damaged.
    """
    changed = {name: value for name, value in (sizes or {}).items() if value is not None}
    origin = "the flags" if file is None else str(_config_file(file))
    content = ({} if file is None else _content(file)) | changed
    if content.get("model_type", "llama") in LLAMA_TYPES:
        config = _own_llama(content, origin)
        if config is not None:
            return OwnLlama(config)
    try:
        check_keys(content, changed)
        return TransformersModel(
            with_architecture(content), folder=_weights_beside(file), changed=changed, towers=towers
        )
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _own_llama(content: Mapping[str, Any], origin: str) -> LlamaConfig | None:
    """Return the config of our own Llama; None if the heads have another size or layers have biases."""
    missing = [name for name in REQUIRED if content.get(name) is None]
    if missing:
        flags = " ".join(f"--{name.replace('_', '-')} N" for name in missing)
        raise ValueError(f"{origin}: missing {', '.join(missing)}; pass a complete config.json, or {flags}")
    given = {field.name: content[field.name] for field in fields(LlamaConfig) if content.get(field.name) is not None}
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    given["rope_theta"], given["rope_scaling"] = rope_of(content)
    sizes = ("num_", "hidden", "intermediate", "vocab", "max_")
    counted = {name: value for name, value in given.items() if name.startswith(sizes)}
    wrong = [f"{name}={value!r}" for name, value in counted.items() if type(value) is not int or value < 1]
    if wrong:
        raise ValueError(f"{origin}: {', '.join(wrong)}; sizes must be positive integers")
    if content.get("head_dim") not in (None, given["hidden_size"] // given["num_attention_heads"]):
        return None
    if content.get("attention_bias") or content.get("mlp_bias"):
        return None
    config = LlamaConfig(**given)
    config.check(1)
    return config


def _content(file: str | Path) -> dict[str, Any]:
    """Return the model config in a config.json or a checkpoint."""
    if not _config_file(file).is_file() and has_checkpoint(file):
        return dict(description_of(open_own(file, None)).config)
    return _read(_config_file(file))


def _config_file(file: str | Path) -> Path:
    return Path(file) / CONFIG_FILE if Path(file).is_dir() else Path(file)


def _weights_beside(file: str | Path | None) -> Path | None:
    """Return the folder of a config.json if it also has weights; the recipe's `model.path`."""
    if file is None or _config_file(file).name != CONFIG_FILE or not _config_file(file).is_file():
        return None
    folder = _config_file(file).parent
    return folder if any(folder.glob("*.safetensors")) else None


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}; pass a Hugging Face config.json or its folder") from error
    except ValueError as error:
        raise ValueError(f"{error}; pass a Hugging Face config.json") from error
