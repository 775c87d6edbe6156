"""The sizes of the model to plan for: from a Hugging Face `config.json`, from single numbers, or both."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from nxd_trainer.models import LlamaConfig

LLAMA_TYPES = ("llama", "mistral")  # with the same tensors
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def model_config(file: str | Path | None = None, sizes: Mapping[str, Any] | None = None) -> LlamaConfig:
    """The config of a Llama.

    Args:
        file: a Hugging Face `config.json`, or the folder it lies in.
        sizes: fields of `LlamaConfig` that go before those of the file; None counts as not given. Without a file they
            are all there is, so those that a file must have must be given.

    Raises:
        ValueError: the file cannot be read, is of another kind of model, or sizes are missing or no numbers.
    """
    origin = "the flags" if file is None else str(_file_of(file))
    content = {} if file is None else _read(_file_of(file))
    rotary = content.get("rope_parameters")  # where transformers 5 writes it
    if content.get("rope_theta") is None and isinstance(rotary, dict):
        content["rope_theta"] = rotary.get("rope_theta")
    content |= {name: value for name, value in (sizes or {}).items() if value is not None}
    missing = [name for name in REQUIRED if content.get(name) is None]
    if missing:
        flags = " ".join(f"--{name.replace('_', '-')} N" for name in missing)
        raise ValueError(f"{origin}: no {', '.join(missing)}; give a whole config.json, or {flags}")
    if content.get("num_key_value_heads") is None:
        content["num_key_value_heads"] = content["num_attention_heads"]
    known = {field.name: content[field.name] for field in fields(LlamaConfig) if content.get(field.name) is not None}
    wrong = [
        f"{name}={value!r}"
        for name, value in known.items()
        if name.startswith(("num_", "hidden", "intermediate", "vocab", "max_")) and not _is_size(value)
    ]
    if wrong:
        raise ValueError(f"{origin}: {', '.join(wrong)}; sizes are positive whole numbers")
    config = LlamaConfig(**known)
    config.check(1)
    _check_shape_of_layers(content, config, origin)
    return config


def _file_of(file: str | Path) -> Path:
    return Path(file) / "config.json" if Path(file).is_dir() else Path(file)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}; give a Hugging Face config.json or its folder") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON: {error}; give a Hugging Face config.json") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; a config.json holds an object with sizes")
    kind = content.get("model_type", "llama")
    if kind not in LLAMA_TYPES:
        raise ValueError(
            f"{file}: model_type={kind!r}; plans are made with the layers of a Llama ({', '.join(LLAMA_TYPES)}). For "
            "another model of like shape give its sizes as flags"
        )
    return content


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_shape_of_layers(content: Mapping[str, Any], config: LlamaConfig, origin: str) -> None:
    head_size = content.get("head_dim")
    if head_size is not None and head_size != config.head_size:
        raise ValueError(
            f"{origin}: head_dim={head_size}, but hidden_size / num_attention_heads = {config.head_size}; models with "
            "heads of another size cannot be planned yet"
        )
    biases = [f"{name}=true" for name in ("attention_bias", "mlp_bias") if content.get(name)]
    if biases:
        raise ValueError(f"{origin}: {', '.join(biases)}; layers with biases cannot be planned yet")
