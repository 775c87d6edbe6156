"""Adapters in Hugging Face PEFT's files: `adapter_config.json` and `adapter_model.safetensors` in one folder.

PEFT's names are ours with a prefix (and `.weight` behind A and B), and its tensors are whole: files do not know the
layout they came from. Needs safetensors: `pip install nxd-lora[peft]`.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nxd_state import Group, active_group, on_every_rank
from torch import Tensor

from nxd_lora.adapter import factor_name
from nxd_lora.adapter_config import (
    adapted_logical_layers,
    adapted_weights,
    adapter_config,
    check_same_scale,
    check_tensors,
    config_from_adapter_config,
)
from nxd_lora.config import LoraConfig
from nxd_lora.linear import FACTOR_NAMES
from nxd_lora.model import LoraModel
from nxd_lora.state import gather_adapter, load_adapter

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save_peft_adapter(
    model: LoraModel, folder: str | os.PathLike[str], *, base_model_name_or_path: str | None = None
) -> None:
    """Write the adapter so that PEFT loads it on the unsharded model. Called by all ranks; rank 0 writes.

    Args:
        model: the model; its names must be the unsharded model's.
        folder: the folder to write, created if necessary; only rank 0 needs access to it.
        base_model_name_or_path: value for the config, for PEFT's `AutoPeftModel`.

    Raises:
        RuntimeError: on all ranks: rank 0 cannot write, or the folder already holds an adapter.
    """
    content = adapter_config(model, base_model_name_or_path=base_model_name_or_path)
    in_files = peft_form(model)
    tensors = {}
    for name, tensor in gather_adapter(model).items():
        in_file, reshape = in_files(name)
        tensors[in_file] = reshape(tensor).contiguous()
    _on_rank_zero(f"writing {folder}", lambda: _write(Path(folder), content, tensors))


def peft_form(model: LoraModel) -> Callable[[str], tuple[str, Callable[[Tensor], Tensor]]]:
    """Return how PEFT's files name and shape the adapter's tensors. Called by all ranks.

    Args:
        model: the model; its names must be the unsharded model's.

    Returns:
        A function of a tensor's name. It returns the name in files, and a function from the whole tensor to its shape
        there.
    """
    adapted = adapted_logical_layers(model)
    of_experts = peft_names_of_weights(adapted_weights(model))

    def form(name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
        if name in of_experts:
            return of_experts[name], partial(_flat_factor, name)
        return _peft_name(name, adapted), lambda tensor: tensor

    return form


def write_peft_files(folder: str | os.PathLike[str], content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter that is not in a model, such as that of a checkpoint, so that PEFT loads it.

    Args:
        folder: the folder to write, created if necessary.
        content: the adapter's description, from `adapter_config`; without `target_parameters`.
        tensors: the adapter's whole tensors, by the unsharded model's names.

    Raises:
        FileExistsError: the folder already holds an adapter.
    """
    adapted = {name.rpartition(".")[0] for name in tensors if name.endswith(FACTOR_NAMES)}
    named = {_peft_name(name, adapted): tensor.contiguous() for name, tensor in tensors.items()}
    _write(Path(folder), content, named)


def write_adapter_config(model: LoraModel, folder: str | os.PathLike[str]) -> None:
    """Write `adapter_config.json` alone. Called by all ranks; rank 0 writes.

    Raises:
        RuntimeError: on all ranks: rank 0 cannot write.
    """
    content = adapter_config(model)
    _on_rank_zero(f"writing {folder}", lambda: _write_config(Path(folder), content))


def load_peft_adapter(model: LoraModel, folder: str | os.PathLike[str]) -> None:
    """Fill the adapter from PEFT's files. Called by all ranks; every rank reads.

    Args:
        model: the model, wrapped with `read_peft_config(folder)` or a config that adapts the same layers.
        folder: a folder written by PEFT's `save_pretrained`.

    Raises:
        RuntimeError: on all ranks: a rank cannot read the files.
        ValueError: the adapter does not fit the model, or has another rank, alpha or use_rslora.
    """
    file = Path(folder) / TENSOR_FILE
    tensors = on_every_rank(f"reading {file}", lambda: _safetensors().load_file(file), _world())
    config_file = Path(folder) / CONFIG_FILE
    content = on_every_rank(f"reading {config_file}", lambda: json.loads(config_file.read_text()), _world())
    config = config_from_adapter_config(content)
    check_same_scale(model, config, str(folder))
    own_names = {peft: own for own, peft in peft_names_of_weights(adapted_weights(model)).items()}
    whole = {}
    for name, tensor in tensors.items():
        own = own_names.get(name)
        whole[own or name_from_peft(name)] = tensor if own is None else _own_factor(own, tensor, config.lora_rank)
    load_adapter(model, whole)


def read_peft_config(folder: str | os.PathLike[str]) -> LoraConfig:
    """Return the config of an adapter that was written by PEFT or `save_peft_adapter`.

    Raises:
        ValueError: it does not describe a LoRA adapter, uses unsupported features, or does not match the tensors beside
            it.
    """
    file = Path(folder) / CONFIG_FILE
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; expected a JSON object")
    config = config_from_adapter_config(content)
    if not config.target_parameters and (shapes := _stored_shapes(Path(folder) / TENSOR_FILE)):
        check_tensors(config, shapes, str(folder))  # before the config is used
    return config


def _stored_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file, by our names; empty if it cannot be read: loading it reports the error."""
    try:
        with _safetensors().safe_open(file, framework="pt") as stored:
            names = list(stored.keys())
            return {name_from_peft(name): tuple(stored.get_slice(name).get_shape()) for name in names}
    except Exception:  # safetensors raises its own types, and may be missing
        return {}


def name_from_peft(name: str) -> str:
    """Return the name in the unsharded model of a tensor in PEFT's files."""
    own = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
    return own.removesuffix(".weight") if own.endswith((".lora_A.weight", ".lora_B.weight")) else own


def peft_names_of_weights(weights: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return PEFT's names of the factors of experts, by ours.

    PEFT wraps a module once for each of its parameters; the first parameter is in the innermost wrapper.

    Args:
        weights: the adapted weights of each module, in their order, by the module's name.
    """
    names = {}
    for layer, parts in weights.items():
        for place, part in enumerate(parts):
            inside = "base_layer." * (len(parts) - 1 - place)
            for factor in FACTOR_NAMES:
                names[f"{layer}.{factor_name(factor, part)}"] = f"{_PREFIX}{layer}.{inside}{factor}.weight"
    return names


def _flat_factor(name: str, factor: Tensor) -> Tensor:
    """Return a factor of experts as PEFT stores it.

    A `[experts, r, in]` becomes `[experts * r, in]`, B `[experts, out, r]` becomes `[out, r * experts]`.
    """
    return factor.flatten(0, 1) if _is_a(name) else factor.permute(1, 2, 0).flatten(1)


def _own_factor(name: str, flat: Tensor, lora_rank: int) -> Tensor:
    """Undo `_flat_factor`; a tensor that does not have `lora_rank` is returned unchanged."""
    if flat.dim() != 2 or flat.shape[0 if _is_a(name) else 1] % lora_rank:
        return flat
    return flat.unflatten(0, (-1, lora_rank)) if _is_a(name) else flat.unflatten(1, (lora_rank, -1)).permute(2, 0, 1)


def _is_a(name: str) -> bool:
    return name.rpartition(".")[2].startswith(f"{FACTOR_NAMES[0]}_")


def _peft_name(name: str, adapted: set[str]) -> str:
    layer, _, last = name.rpartition(".")
    if last in ("lora_A", "lora_B"):
        return f"{_PREFIX}{name}.weight"
    if last == "bias" and layer in adapted:
        return f"{_PREFIX}{layer}.base_layer.bias"  # PEFT keeps an adapted layer inside a wrapper
    return _PREFIX + name


def _write(folder: Path, content: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    target = folder / TENSOR_FILE
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another folder")
    config_file = _write_config(folder, content)
    unfinished = folder / f".{TENSOR_FILE}.unfinished"
    _safetensors().save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(config_file.stat().st_mode)  # safetensors creates files that only their owner can read
    unfinished.rename(target)


def _write_config(folder: Path, content: Mapping[str, Any]) -> Path:
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
        raise ImportError("adapter files need safetensors; pip install 'nxd-lora[peft]'") from error
    return safetensors.torch
