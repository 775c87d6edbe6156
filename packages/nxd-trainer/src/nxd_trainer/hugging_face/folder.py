"""The contents of a Hugging Face folder besides weights: its config, and the tokenizer files copied with it."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"

PathLike = str | os.PathLike[str]

# Files that `save_pretrained` of models, tokenizers and processors writes besides weights.
_COMPANIONS = (
    "generation_config.json",
    "*token*",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "*preprocessor_config.json",
    "processor_config.json",
)

_COUNTS_MODULES = re.compile(r"^(?!.*(size|dim|vocab)).*(layer|block|depth|stage)")


def read_config(folder: PathLike) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        ValueError: there is none, or it is no JSON object.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the folder of a model, with its {CONFIG_FILE}")
    return read_json_object(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def with_plain_floats(value: Any) -> Any:
    """A value of a config, with the floats that JSON does not know, written as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        if list(value) == ["__float__"] and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: with_plain_floats(held) for key, held in value.items()}
    return [with_plain_floats(held) for held in value] if isinstance(value, list) else value


def refuse_hub_code(config: Mapping[str, Any]) -> None:
    """Raise ValueError where a config, or one in it, names a kernel of a hub: transformers would load and run it."""
    for key, value in config.items():
        if isinstance(value, Mapping) and not key.endswith("_implementation"):
            refuse_hub_code(value)
        elif key.endswith("_implementation") and "/" in str(value):
            raise ValueError(
                f"the config has {key}={value!r}, code from a hub, which is not run; leave it out, or give one of "
                "transformers' own, such as 'sdpa'"
            )


def refuse_endless_counts(config: Mapping[str, Any]) -> None:
    """Raise ValueError where a config, or one in it, counts more of something than any model has.

    transformers makes a module for each layer and a text for each label, so that a large enough count never ends.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            refuse_endless_counts(value)
            continue
        most = 10_000 if _COUNTS_MODULES.search(key) else 1_000_000 if key.startswith("num_") else None
        values = value if isinstance(value, list) else [value]
        if most is not None and any(isinstance(one, int | float) and one > most for one in values):
            raise ValueError(
                f"the config has {key}={value!r:.100}, more than the {most:,} that are believed; correct it"
            )


def write_config(folder: PathLike, config: Mapping[str, Any]) -> None:
    """Write `config.json`; keys keep their order."""
    (Path(folder) / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def copy_companions(source: PathLike, target: PathLike) -> list[str]:
    """Copy the files of tokenizer, processor and generation that lie beside a model, no matter how it is stored.

    Args:
        source: a folder, or the one file of a tokenizer.
        target: an existing folder.

    Returns:
        The names of the files.
    """
    folder = Path(source)
    if folder.is_file():
        files = [folder]
    else:
        files = sorted({file for pattern in _COMPANIONS for file in folder.glob(pattern) if file.is_file()})
    for file in files:
        shutil.copyfile(file, Path(target) / file.name)
    return [file.name for file in files]
