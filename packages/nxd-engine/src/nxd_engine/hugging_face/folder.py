"""The config of a Hugging Face folder: reading, writing and checking it."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"

PathLike = str | os.PathLike[str]

_COUNTS_MODULES = re.compile(r"^(?!.*(size|dim|vocab)).*(layer|block|depth|stage)")


def read_config(folder: PathLike) -> dict[str, Any]:
    """Read `config.json`.

    Raises:
        ValueError: the file does not exist, or is not a JSON object.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist; pass the folder of a model, with its {CONFIG_FILE}")
    return read_json_object(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    return parse_json_object(path, path.read_bytes())


def parse_json_object(path: PathLike, content_bytes: bytes) -> dict[str, Any]:
    """Parse the bytes of a JSON file; `path` is for messages, see `read_json_object`."""
    try:
        content = json.loads(content_bytes)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected an object")
    return content


def with_plain_floats(value: Any) -> Any:
    """Decode the floats that JSON lacks, which transformers writes as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        if list(value) == ["__float__"] and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: with_plain_floats(held) for key, held in value.items()}
    return [with_plain_floats(held) for held in value] if isinstance(value, list) else value


def check_config(config: Mapping[str, Any], other_names: Mapping[str, str] | None = None) -> None:
    """Raise ValueError if a config, or a config in it, would make transformers run code from a hub or never finish.

    transformers creates modules for each layer and a text for each label, so a huge count would never finish.

    Args:
        config: content of a `config.json`.
        other_names: `attribute_map` of the config's class: its own names, by transformers' common names.
    """
    for key, value in config.items():
        if key == "attribute_map":
            raise ValueError("the config has attribute_map, which gives other keys new meanings; remove it")
        if "_implementation" in key and "/" in str(value):
            raise ValueError(
                f"the config has {key}={value!r}, code from a hub, which is not run; remove it, or use one of "
                "transformers' own, such as 'sdpa'"
            )
        names = {key}
        for common, own in (other_names or {}).items():
            names |= {common, own} if key in (common, own) else set()
        most = min(map(_most, names))
        for one in _flat(value):
            if isinstance(one, Mapping):
                check_config(one, other_names)
            elif isinstance(one, int | float) and one > most:
                raise ValueError(f"the config has {key}={value!r:.100}, more than the allowed {most:,}; correct it")


def _most(key: str) -> float:
    """The largest number that a config may have under this key."""
    return 10_000 if _COUNTS_MODULES.search(key) else 1_000_000 if key.startswith("num_") else math.inf


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def write_config(folder: PathLike, config: Mapping[str, Any]) -> None:
    """Write `config.json`, keys in their order."""
    (Path(folder) / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
