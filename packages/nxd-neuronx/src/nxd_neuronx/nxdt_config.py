"""The configs of neuronx-distributed-training, as far as the checkpoint converter reads them."""

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
    """The content of a YAML file; nothing in it is executed.

    Raises:
        ValueError: there is no such file, or it is not YAML.
    """
    try:
        return yaml.safe_load(Path(file_path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{file_path} does not exist; pass the YAML config of the training run") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file_path} is not YAML: {' '.join(str(error).split())}") from error


def convert_yaml_to_json(yaml_path: str, filename: str = "yaml_config.json") -> str:
    """Write what the checkpoint converter needs of a training config as a model's config.json.

    Args:
        yaml_path: the training config, whose `model` section says the model's sizes.
        filename: the file to write.

    Returns:
        `filename`.

    Raises:
        ValueError: the file is not of that form.
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
