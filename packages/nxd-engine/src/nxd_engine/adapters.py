"""LoRA adapters in checkpoints, in the three modes of `LoraConfig`, at any layout; with the documented API and without.

| save_lora_base | merge_lora | tensors in the checkpoint |
|---|---|---|
| False | False | the adapter: factors, and biases that train |
| True | False | the base model, unmerged, and the adapter, each under its own names |
| True | True | the base model with the adapter in its weights: an ordinary model's checkpoint |

The adapter's description is stored in the checkpoint's objects under "lora", so both are committed together; with
`save_lora_config_adapter=False` it is also written to `<path>/<tag>/lora_adapter/adapter_config.json`.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nxd_ckpt
from nxd_ckpt import CheckpointError, Coordinator
from nxd_ckpt.coordinator import coordinator_for, on_every_rank
from nxd_ckpt.interop import as_extra
from nxd_lora import (
    LoraConfig,
    LoraModel,
    TargetLayers,
    adapter_config,
    adapter_names,
    check_same_scale,
    config_from_adapter_config,
    find_target_layers,
    write_adapter_config,
)
from nxd_lora.config import DESCRIBED
from nxd_state import values_changed
from torch import nn

from nxd_engine.checkpoints.fill import check_names
from nxd_engine.checkpoints.find import write_text
from nxd_engine.checkpoints.model_description import ADAPTER_KEY, describe_model, with_companions
from nxd_engine.checkpoints.state import CheckpointState, kind_of, model_state, owner_of
from nxd_engine.nxd_model import NxDModel
from nxd_engine.unwrap import plain_model, tied_names

ADAPTER_FOLDER = "lora_adapter"
CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True)
class ChosenAdapters:
    """The adapters chosen for a model.

    Attributes:
        config: the adapters' config; for adapters from a checkpoint, the fields that describe them come from there.
        layers: the layers to adapt.
        tag: the tag of the checkpoint in `config.lora_save_dir`; None if the adapters are new.
    """

    config: LoraConfig
    layers: TargetLayers
    tag: str | None


def choose_adapters(module: nn.Module, config: LoraConfig) -> ChosenAdapters:
    """Find the layers that a config names in a whole model, which may be on the meta device. Called by all ranks.

    Raises:
        ValueError: a target matches no layer that can be adapted.
        CheckpointError: there is no such checkpoint, or it holds no adapter.
    """
    config, tag = config_of_checkpoint(config)
    return ChosenAdapters(config, find_target_layers(module, config) if config.enable_lora else {}, tag)


def adapt_model(model: NxDModel, chosen: ChosenAdapters) -> None:
    """Add adapters to a model, and fill them from their checkpoint if they have one. Called by all ranks."""
    lora = model.add_adapters(chosen.config, chosen.layers)
    root = chosen.config.lora_save_dir
    if chosen.tag is None or root is None:
        return
    coordinator = coordinator_for(None)
    doing = f"loading the adapter in checkpoint {chosen.tag!r} from {root}"
    checkpoint = on_every_rank(coordinator, doing, lambda: nxd_ckpt.open_checkpoint(root, chosen.tag))
    state = on_every_rank(coordinator, doing, lambda: model_state(model.pipeline))
    into = state if has_base(checkpoint.objects) else _adapter_of(lora, state)
    where = f"checkpoint {chosen.tag!r} in {root}"
    check_names(checkpoint.tensors, into, tied_names(model.pipeline), where, coordinator, can_be_lax=False)
    nxd_ckpt.load(root, chosen.tag, into=into, strict=False, convert_dtype=True)


@contextmanager
def weights_to_save(lora: LoraModel | None, coordinator: Coordinator, doing: str) -> Iterator[None]:
    """Inside the block, the weights are merged or unmerged, as the config wants them saved. Called by all ranks.

    Raises:
        ValueError: a weight to merge is tied to another, or adapters are merged but should not be; on all ranks.
    """
    if lora is None:
        yield
        return
    was_merged = lora.is_merged

    def prepare() -> None:
        if lora.lora_config.merge_lora:
            lora.merge()
        elif was_merged:
            raise ValueError("the adapter is merged into the base model's weights; unmerge() first")

    try:
        on_every_rank(coordinator, doing, prepare, error_type=ValueError)
        yield
    finally:
        if not was_merged:
            lora.unmerge()


def check_can_be_merged(model: NxDModel) -> None:
    """Raise ValueError if an adapted weight on this rank is tied to another one, which merging would also change.

    This makes a run fail before its first step, not when its result is used.
    """
    lora = model.lora_model
    if lora is None:
        return
    tied = tied_names(plain_model(model))
    weights = {f"{name.rpartition('.')[0]}.weight" for name in adapter_names(lora, with_biases=False)}
    found = sorted(weights & {*tied, *tied.values()})
    if found:
        raise ValueError(
            f"lora: {found[0]} is tied to another weight, so its adapter could never be merged, exported or served; "
            f"leave {found[0].split('.')[-2]} out of lora.target_modules"
        )


def saved_tensors(lora: LoraModel | None, state: CheckpointState) -> CheckpointState:
    """Return the tensors to save: all of them, the adapter's, or with merged weights those of an ordinary model.

    Merged adapters no longer train, so their optimizer states are omitted as well.
    """
    if lora is None or (lora.lora_config.save_lora_base and not lora.lora_config.merge_lora):
        return state
    if lora.lora_config.merge_lora:
        merged = set(adapter_names(lora, with_biases=False))
        return {name: tensor for name, tensor in state.items() if owner_of(name) not in merged}
    adapter = set(adapter_names(lora))
    return {name: tensor for name, tensor in state.items() if kind_of(name) != "model" or name in adapter}


def describe_adapter(lora: LoraModel | None) -> Mapping[str, Any] | None:
    """Return the checkpoint's description of the model's adapter; None if it has no adapter. Called by all ranks."""
    if lora is None or lora.lora_config.merge_lora:
        return None
    return {"adapter": adapter_config(lora), "has_base": lora.lora_config.save_lora_base}


def write_description(description: Mapping[str, Any] | None, lora: LoraModel | None, root: str, tag: str) -> None:
    """Also write it next to the checkpoint's files, if the config says so. Called by one rank, after the commit."""
    if description is None or lora is None or lora.lora_config.save_lora_config_adapter:
        return
    write_text(f"{root}/{tag}/{ADAPTER_FOLDER}", CONFIG_FILE, json.dumps(description["adapter"], indent=2) + "\n")


def settle_adapters(lora: LoraModel | None, objects: Any) -> None:
    """After a load, reset the adapters if the checkpoint held a model without adapters."""
    if lora is not None and not _has_adapter(objects):
        lora.reset()


def wanted_tensors(lora: LoraModel | None, objects: Any, state: CheckpointState, where: str) -> CheckpointState:
    """Return the tensors of a model that a checkpoint should fill.

    Raises:
        CheckpointError: it holds only adapters, and the model has none.
        ValueError: its adapters and those of the model have different scales.
    """
    if lora is None:
        if _has_adapter(objects) and not has_base(objects):
            raise CheckpointError(
                f"{where} holds only an adapter; make the model with lora_config, and load the base model separately"
            )
        return state
    if lora.is_merged:
        raise CheckpointError("the adapter is merged into the model's weights; unmerge() before loading")
    if not _has_adapter(objects):
        factors = set(adapter_names(lora, with_biases=False))
        return {name: tensor for name, tensor in state.items() if name not in factors}
    check_same_scale(lora, config_from_adapter_config(objects[ADAPTER_KEY]["adapter"]), where)
    return state if has_base(objects) else _adapter_of(lora, state)


def _has_adapter(objects: Any) -> bool:
    return isinstance(objects, dict) and ADAPTER_KEY in objects


def _adapter_of(lora: LoraModel, state: CheckpointState) -> CheckpointState:
    return {name: state[name] for name in adapter_names(lora) if name in state}


def save_lora_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    model: LoraModel,
    *,
    objects: Mapping[str, Any] | None = None,
    step: int | None = None,
    overwrite: bool = False,
) -> None:
    """Save `model` as its config says. Called by all ranks; the model is bit-identical afterwards.

    With `enable_lora=False` there is no adapter, and the checkpoint is an ordinary one of the base model.

    Args:
        path: folder for checkpoints.
        tag: name of this checkpoint.
        model: the model.
        objects: further JSON-serializable values to keep; the key "lora" is reserved.
        step: as for `nxd_ckpt.save`.
        overwrite: as for `nxd_ckpt.save`.

    Raises:
        RuntimeError: the adapter is merged into the weights, but they should be saved without it.
        ValueError: a weight to merge is tied to another, or `objects` has the key "lora".
        CheckpointError: the checkpoint cannot be written; on all ranks.
    """
    config = model.lora_config
    if ADAPTER_KEY in (objects or {}):
        raise ValueError(f"objects has the key {ADAPTER_KEY!r}, which is reserved for the adapter; use another key")
    described = describe_model(model, model.module)
    lora = model if config.enable_lora else None
    description = describe_adapter(lora)
    if description is not None:
        _check_unmerged(model)
    with weights_to_save(lora, coordinator_for(None), f"saving checkpoint {tag!r} to {os.fspath(path)}"):
        nxd_ckpt.save(
            path,
            tag,
            saved_tensors(lora, model_state(model.module)),
            objects={
                **(described.as_objects() if described else {}),
                **(objects or {}),
                **({} if description is None else {ADAPTER_KEY: description}),
            },
            extra=as_extra(with_companions(described).files) if described else None,
            step=step,
            overwrite=overwrite,
        )
    if description is not None and not config.save_lora_config_adapter:
        write_adapter_config(model, Path(path) / tag / ADAPTER_FOLDER)


def load_lora_checkpoint(path: str | os.PathLike[str], model: LoraModel, tag: str | None = None) -> None:
    """Fill the adapter, and the base model if the checkpoint has it, at any layout. Called by all ranks.

    Args:
        path: folder of checkpoints.
        model: a model adapted like the checkpoint's; see `initialize_lora_model`.
        tag: the checkpoint; None for the newest.

    Raises:
        RuntimeError: the adapter is merged into the weights.
        ValueError: the checkpoint's rank, alpha or use_rslora differs from the model's.
        CheckpointError: there is no such checkpoint, it holds no adapter, or it belongs to another model.
    """
    found, description = _describe(path, tag)
    saved = config_from_adapter_config(description["adapter"])
    check_same_scale(model, saved, f"checkpoint {found!r} in {os.fspath(path)}")
    nxd_ckpt.load(path, found, into=lora_state(model, with_base=description["has_base"]))
    values_changed(model.module.parameters())


def read_lora_config(path: str | os.PathLike[str], tag: str | None = None) -> LoraConfig:
    """Return the config of the adapter in a checkpoint, the newest if no tag is given. Called by all ranks."""
    return config_from_adapter_config(_describe(path, tag)[1]["adapter"])


def initialize_lora_model(module: nn.Module, config: LoraConfig) -> LoraModel:
    """Wrap a model as `config` says, with an adapter from a checkpoint if it asks for one. Called by all ranks.

    With `load_lora_from_ckpt`, the fields that describe the adapter (rank, targets, ...) come from the checkpoint;
    those that say how to save come from `config`.

    Raises:
        CheckpointError: there is no such checkpoint, it holds no adapter, or it belongs to another model.
        ValueError: as for `LoraModel`.
    """
    chosen, tag = config_of_checkpoint(config)
    model = LoraModel(module, chosen)
    if tag is not None and chosen.lora_save_dir is not None:
        load_lora_checkpoint(chosen.lora_save_dir, model, tag)
    return model


def config_of_checkpoint(config: LoraConfig) -> tuple[LoraConfig, str | None]:
    """Return the adapters' config, completed from their checkpoint if they have one, and its tag or None.

    Called by all ranks.
    """
    if not (config.enable_lora and config.load_lora_from_ckpt) or config.lora_save_dir is None:
        return config, None
    tag, description = _describe(config.lora_save_dir, config.lora_load_tag)
    saved = config_from_adapter_config(description["adapter"])
    return replace(config, **{name: getattr(saved, name) for name in DESCRIBED}), tag


def has_base(objects: Any) -> bool:
    """Whether a checkpoint with these objects holds the base model along with the adapter."""
    return bool(objects[ADAPTER_KEY]["has_base"])


def _check_unmerged(model: LoraModel) -> None:
    if model.is_merged:
        raise RuntimeError("the adapter is merged into the base model's weights; unmerge() first")


def lora_state(model: LoraModel, *, with_base: bool) -> CheckpointState:
    """Return the adapter, and the base model if wanted, as logical tensors that share the model's memory."""
    _check_unmerged(model)
    state = model_state(model.module)
    return state if with_base else _adapter_of(model, state)


def _describe(path: str | os.PathLike[str], tag: str | None) -> tuple[str, dict[str, Any]]:
    """Return the adapter's tag and description; reads no tensors."""
    found = nxd_ckpt.load(path, tag, into={}, strict=False)
    description = found.objects.get(ADAPTER_KEY) if isinstance(found.objects, dict) else None
    if description is None:
        raise CheckpointError(
            f"checkpoint {found.tag!r} in {os.fspath(path)} holds no LoRA adapter; if it was saved with "
            "merge_lora=True, the adapter is in its weights: load it as an ordinary model"
        )
    return found.tag, description
