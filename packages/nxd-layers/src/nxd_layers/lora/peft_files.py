"""Adapters in Hugging Face PEFT's files: `adapter_config.json` and `adapter_model.safetensors` in one folder.

PEFT's names are ours with a prefix (and `.weight` behind A and B), and its tensors are whole: files do not know the
layout they came from. Needs safetensors: `pip install nxd-layers[peft]`.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nxd_state import Group, active_group, on_every_rank
from torch import Tensor

from nxd_layers.lora.adapter_config import (
    adapted_logical_layers,
    adapter_config,
    check_same_scale,
    config_from_adapter_config,
)
from nxd_layers.lora.config import LoraConfig
from nxd_layers.lora.model import LoraModel
from nxd_layers.lora.state import gather_adapter, load_adapter

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save_peft_adapter(
    model: LoraModel, folder: str | os.PathLike[str], *, base_model_name_or_path: str | None = None
) -> None:
    """Write the adapter so that PEFT loads it on the unsharded model. Called by all ranks; rank 0 writes.

    Args:
        model: the model; its names must be the unsharded model's.
        folder: made if need be; all ranks may see it or only rank 0.
        base_model_name_or_path: noted in the config, for PEFT's `AutoPeftModel`.

    Raises:
        RuntimeError: rank 0 cannot write, or the folder holds an adapter already; on all ranks.
    """
    content = adapter_config(model, base_model_name_or_path=base_model_name_or_path)
    adapted = adapted_logical_layers(model)
    tensors = {_peft_name(name, adapted): tensor.contiguous() for name, tensor in gather_adapter(model).items()}
    _on_rank_zero(f"writing {folder}", lambda: _write(Path(folder), content, tensors))


def write_adapter_config(model: LoraModel, folder: str | os.PathLike[str]) -> None:
    """Write `adapter_config.json` alone. Called by all ranks; rank 0 writes.

    Raises:
        RuntimeError: rank 0 cannot write; on all ranks.
    """
    content = adapter_config(model)
    _on_rank_zero(f"writing {folder}", lambda: _write_config(Path(folder), content))


def load_peft_adapter(model: LoraModel, folder: str | os.PathLike[str]) -> None:
    """Fill the adapter from PEFT's files. Called by all ranks; every rank reads.

    Args:
        model: wrapped with `read_peft_config(folder)`, or a config that adapts the same layers.
        folder: as PEFT's `save_pretrained` wrote it.

    Raises:
        RuntimeError: a rank cannot read the files; on all ranks.
        ValueError: the adapter does not fit the model, or its rank, alpha or use_rslora are not the model's.
    """
    file = Path(folder) / TENSOR_FILE
    tensors = on_every_rank(f"reading {file}", lambda: _safetensors().load_file(file), _world())
    config_file = Path(folder) / CONFIG_FILE
    content = on_every_rank(f"reading {config_file}", lambda: json.loads(config_file.read_text()), _world())
    check_same_scale(model, config_from_adapter_config(content), str(folder))
    load_adapter(model, {name_from_peft(name): tensor for name, tensor in tensors.items()})


def read_peft_config(folder: str | os.PathLike[str]) -> LoraConfig:
    """The config of an adapter that PEFT, or `save_peft_adapter`, wrote.

    Raises:
        ValueError: it is not of a LoRA adapter, or asks for something that is not supported.
    """
    file = Path(folder) / CONFIG_FILE
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; expected an object")
    return config_from_adapter_config(content)


def name_from_peft(name: str) -> str:
    """The name that a tensor of PEFT's files has in the unsharded model."""
    own = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
    return own.removesuffix(".weight") if own.endswith((".lora_A.weight", ".lora_B.weight")) else own


def _peft_name(name: str, adapted: set[str]) -> str:
    layer, _, last = name.rpartition(".")
    if last in ("lora_A", "lora_B"):
        return f"{_PREFIX}{name}.weight"
    if last == "bias" and layer in adapted:
        return f"{_PREFIX}{layer}.base_layer.bias"  # PEFT keeps an adapted layer inside of another
    return _PREFIX + name


def _write(folder: Path, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    target = folder / TENSOR_FILE
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another folder")
    config_file = _write_config(folder, content)
    unfinished = folder / f".{TENSOR_FILE}.unfinished"
    _safetensors().save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(config_file.stat().st_mode)  # safetensors makes files that only their owner may read
    unfinished.rename(target)


def _write_config(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(content, indent=2) + "\n")
    return file


def _on_rank_zero(doing: str, act: Callable[[], object]) -> None:
    on_every_rank(doing, act if _world().rank == 0 else lambda: None, _world())


def _world() -> Group:
    return active_group("pp", "dp", "cp", "tp")


def _safetensors() -> Any:
    try:
        import safetensors.torch  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError("adapter files need safetensors; pip install 'nxd-layers[peft]'") from error
    return safetensors.torch
