"""Determines the model to plan, from a Hugging Face `config.json`, a checkpoint, sizes given as flags, or a mix."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from nxd_engine.checkpoints.find import has_checkpoint, open_own
from nxd_engine.hugging_face import CONFIG_FILE, check_keys, with_architecture
from nxd_engine.model_description import description_of, rope_of
from nxd_engine.models import LlamaConfig

from nxd_plan.model import OwnLlama, PlannedModel
from nxd_plan.transformers_model import TransformersModel

LLAMA_TYPES = ("llama", "mistral")  # they have the same tensors
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def planned_model(file: str | Path | None = None, sizes: Mapping[str, Any] | None = None) -> PlannedModel:
    """Return the model that a file describes: our own Llama if it matches, else a transformers model.

    Args:
        file: a Hugging Face `config.json`, the folder that contains it, or a folder of checkpoints, of which the newest
            is used.
        sizes: config keys that override those of the file; None counts as not given. Without a file, the model is a
            Llama and all required sizes must be given.

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
        return TransformersModel(with_architecture(content), folder=_weights_beside(file), changed=changed)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _own_llama(content: Mapping[str, Any], origin: str) -> LlamaConfig | None:
    """The config of our own Llama; None if the heads have another size or layers have biases."""
    missing = [name for name in REQUIRED if content.get(name) is None]
    if missing:
        flags = " ".join(f"--{name.replace('_', '-')} N" for name in missing)
        raise ValueError(f"{origin}: missing {', '.join(missing)}; pass a complete config.json, or {flags}")
    given = {field.name: content[field.name] for field in fields(LlamaConfig) if content.get(field.name) is not None}
    given.setdefault("num_key_value_heads", given["num_attention_heads"])
    given["rope_theta"], given["rope_scaling"] = rope_of(content)
    sizes = ("num_", "hidden", "intermediate", "vocab", "max_")
    wrong = [f"{name}={value!r}" for name, value in given.items() if name.startswith(sizes) and not _is_size(value)]
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
    """The model config in a config.json or a checkpoint."""
    if not _config_file(file).is_file() and has_checkpoint(file):
        return dict(description_of(open_own(file, None)).config)
    return _read(_config_file(file))


def _config_file(file: str | Path) -> Path:
    return Path(file) / CONFIG_FILE if Path(file).is_dir() else Path(file)


def _weights_beside(file: str | Path | None) -> Path | None:
    """The folder of a config.json if it also has weights; the recipe's `model.path`."""
    if file is None or _config_file(file).name != CONFIG_FILE or not _config_file(file).is_file():
        return None
    folder = _config_file(file).parent
    return folder if any(folder.glob("*.safetensors")) else None


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}; pass a Hugging Face config.json or its folder") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}; pass a Hugging Face config.json") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; a config.json must hold an object with the sizes")
    return content


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
