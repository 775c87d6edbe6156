"""The keys of neuronx-distributed-training configs that the checkpoint converter reads."""

import json
from pathlib import Path
from typing import Any

import yaml

_KEYS = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
    "num_key_value_heads": "num_kv_heads",
}


def load_yaml_file(file_path: str) -> Any:
    """Return the content of a YAML file, a ValueError if it does not exist or is not YAML; executes nothing in it."""
    try:
        return yaml.safe_load(Path(file_path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{file_path} does not exist; pass the YAML config of the training run") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file_path} is not YAML: {' '.join(str(error).split())}") from error


def convert_yaml_to_json(yaml_path: str, filename: str = "yaml_config.json") -> str:
    """Write a training config's model sizes as a config.json for the checkpoint converter.

    Args:
        yaml_path: training config with a `model` section.
        filename: the file to write; also the return value.

    Raises:
        ValueError: the config has no `model` section with all sizes.
    """
    content = load_yaml_file(yaml_path)
    model = content.get("model") if isinstance(content, dict) else None
    missing = [name for name in _KEYS.values() if not isinstance(model, dict) or name not in model]
    if missing or not isinstance(model, dict):
        raise ValueError(f"{yaml_path} lacks model.{', model.'.join(missing)}; pass the config of a training run")
    config = {key: model[name] for key, name in _KEYS.items()}
    if "moe" in model:
        config["num_local_experts"] = model["moe"]["num_experts"]
    for key, value in config.items():
        if isinstance(value, dict | list):  # which aliases may make of any size
            raise ValueError(f"{yaml_path} has a {type(value).__name__} as the model's {key}; expected a number")
    Path(filename).write_text(json.dumps(config), encoding="utf-8")
    return filename
