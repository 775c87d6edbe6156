"""Checkpoints of models with LoRA adapters, in the three modes of `LoraConfig`, at any layout.

| save_lora_base | merge_lora | tensors in the checkpoint |
|---|---|---|
| False | False | the adapter: factors, and biases that train |
| True | False | the base model, unmerged, and the adapter, each under its own names |
| True | True | the base model with the adapter in its weights: an ordinary model's checkpoint |

The adapter's description lies in the checkpoint's objects under "lora", so that both are committed together; with
`save_lora_config_adapter=False` it is written as `<path>/<tag>/lora_adapter/adapter_config.json`, too.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nxd_ckpt
from nxd_ckpt import CheckpointError
from nxd_layers.lora import (
    LoraConfig,
    LoraModel,
    adapter_config,
    adapter_names,
    check_same_scale,
    config_from_adapter_config,
    write_adapter_config,
)
from torch import nn

from nxd_trainer.checkpoint import CheckpointState, model_state

OBJECT_KEY = "lora"
ADAPTER_FOLDER = "lora_adapter"

# What a checkpoint says of an adapter; the rest of a config says how to save and load.
_DESCRIBED = ("lora_rank", "lora_alpha", "lora_dropout", "bias", "target_modules", "use_rslora", "init_lora_weights")


def save_lora_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    model: LoraModel,
    *,
    objects: Mapping[str, Any] | None = None,
    step: int | None = None,
    overwrite: bool = False,
) -> None:
    """Save `model` as its config says. Called by all ranks; the model is the same afterwards, bit for bit.

    With `enable_lora=False` there is no adapter, and the checkpoint is an ordinary one of the base model.

    Args:
        path: folder for checkpoints.
        tag: name of this one.
        model: the model.
        objects: more JSON-able things to keep; "lora" is taken.
        step: as for `nxd_ckpt.save`.
        overwrite: as for `nxd_ckpt.save`.

    Raises:
        RuntimeError: the adapter is merged into the weights, which are to be saved without it.
        ValueError: a weight to be merged is tied to another, or `objects` has the key "lora".
        CheckpointError: the checkpoint cannot be written; on all ranks.
    """
    config = model.lora_config
    if OBJECT_KEY in (objects or {}):
        raise ValueError(f"objects has the key {OBJECT_KEY!r}, which describes the adapter; choose another one")
    if not config.enable_lora:
        state = model_state(model.module)
        nxd_ckpt.save(path, tag, state, objects=dict(objects or {}), step=step, overwrite=overwrite)
        return
    if config.merge_lora:
        _save_merged(path, tag, model, objects=dict(objects or {}), step=step, overwrite=overwrite)
        return
    description = {"adapter": adapter_config(model), "has_base": config.save_lora_base}
    nxd_ckpt.save(
        path,
        tag,
        lora_state(model, with_base=config.save_lora_base),
        objects={**(objects or {}), OBJECT_KEY: description},
        step=step,
        overwrite=overwrite,
    )
    if not config.save_lora_config_adapter:
        write_adapter_config(model, Path(path) / tag / ADAPTER_FOLDER)


def load_lora_checkpoint(path: str | os.PathLike[str], model: LoraModel, tag: str | None = None) -> None:
    """Fill the adapter, and the base model if the checkpoint has it, at any layout. Called by all ranks.

    Args:
        path: folder of checkpoints.
        model: adapted as the checkpoint's model was; see `initialize_lora_model`.
        tag: the newest one if None.

    Raises:
        RuntimeError: the adapter is merged into the weights.
        ValueError: the checkpoint's rank, alpha or use_rslora are not the model's.
        CheckpointError: there is no such checkpoint, it holds no adapter, or another model's.
    """
    found, description = _describe(path, tag)
    saved = config_from_adapter_config(description["adapter"])
    check_same_scale(model, saved, f"checkpoint {found!r} in {os.fspath(path)}")
    nxd_ckpt.load(path, found, into=lora_state(model, with_base=description["has_base"]))


def read_lora_config(path: str | os.PathLike[str], tag: str | None = None) -> LoraConfig:
    """The config of the adapter in a checkpoint, the newest one if there is no tag. Called by all ranks.

    Raises:
        CheckpointError: there is no such checkpoint, or it holds no adapter.
    """
    return config_from_adapter_config(_describe(path, tag)[1]["adapter"])


def initialize_lora_model(module: nn.Module, config: LoraConfig) -> LoraModel:
    """Wrap a model as `config` says, with an adapter from a checkpoint if it asks for one. Called by all ranks.

    With `load_lora_from_ckpt`, what describes the adapter (rank, targets, ...) is the checkpoint's; how to save is
    the config's.

    Raises:
        CheckpointError: there is no such checkpoint, it holds no adapter, or another model's.
        ValueError: as for `LoraModel`.
    """
    chosen, tag = config_of_checkpoint(config)
    model = LoraModel(module, chosen)
    if tag is not None and chosen.lora_save_dir is not None:
        load_lora_checkpoint(chosen.lora_save_dir, model, tag)
    return model


def config_of_checkpoint(config: LoraConfig) -> tuple[LoraConfig, str | None]:
    """The config of adapters that are to come from a checkpoint, if they are, and its tag. Called by all ranks.

    Raises:
        CheckpointError: there is no such checkpoint, or it holds no adapter.
    """
    if not (config.enable_lora and config.load_lora_from_ckpt) or config.lora_save_dir is None:
        return config, None
    tag, description = _describe(config.lora_save_dir, config.lora_load_tag)
    saved = config_from_adapter_config(description["adapter"])
    return replace(config, **{name: getattr(saved, name) for name in _DESCRIBED}), tag


def has_base(objects: Any) -> bool:
    """Whether a checkpoint with these objects and an adapter has the base model as well."""
    return bool(objects[OBJECT_KEY]["has_base"])


def lora_state(model: LoraModel, *, with_base: bool) -> CheckpointState:
    """The adapter, and the base model if wanted, as logical tensors that share the model's memory.

    Raises:
        RuntimeError: the adapter is merged into the weights.
    """
    if model.is_merged:
        raise RuntimeError("the adapter is merged into the base model's weights; unmerge() first")
    state = model_state(model.module)
    return state if with_base else {name: state[name] for name in adapter_names(model)}


def _save_merged(path: str | os.PathLike[str], tag: str, model: LoraModel, **arguments: Any) -> None:
    was_merged = model.is_merged
    model.merge()
    try:
        factors = set(adapter_names(model, with_biases=False))
        state = {name: tensor for name, tensor in model_state(model.module).items() if name not in factors}
        nxd_ckpt.save(path, tag, state, **arguments)
    finally:
        if not was_merged:
            model.unmerge()


def _describe(path: str | os.PathLike[str], tag: str | None) -> tuple[str, dict[str, Any]]:
    """Tag and description of the adapter; reads no tensors."""
    found = nxd_ckpt.load(path, tag, into={}, strict=False)
    description = found.objects.get(OBJECT_KEY) if isinstance(found.objects, dict) else None
    if description is None:
        raise CheckpointError(
            f"checkpoint {found.tag!r} in {os.fspath(path)} holds no LoRA adapter; if it was saved with "
            "merge_lora=True, the adapter is in its weights: load it as an ordinary model"
        )
    return found.tag, description
