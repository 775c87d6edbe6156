"""LoRA adapters in the documented API: how a config's get into a model, and what checkpoints hold of them.

The three modes of saving are those of `nxd_trainer.lora_checkpoint`, and so is what describes an adapter.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import nxd_ckpt
from nxd_ckpt import CheckpointError, Coordinator
from nxd_ckpt.coordinator import coordinator_for, on_every_rank
from nxd_layers.lora import (
    LoraConfig,
    LoraModel,
    TargetLayers,
    adapter_config,
    adapter_names,
    check_same_scale,
    config_from_adapter_config,
    find_target_layers,
)
from torch import nn

from nxd_trainer.api.checkpoint_tags import write_text
from nxd_trainer.api.model import NxDModel
from nxd_trainer.api.unwrap import further_names
from nxd_trainer.checkpoint import CheckpointState, check_names, kind_of, model_state, owner_of
from nxd_trainer.lora_checkpoint import ADAPTER_FOLDER, OBJECT_KEY, config_of_checkpoint, has_base

CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True)
class ChosenAdapters:
    """What a model is to get.

    Attributes:
        config: how adapters are; what describes them is the checkpoint's if they come from one.
        layers: which layers have them.
        tag: of the checkpoint in `config.lora_save_dir`; None if adapters are new.
    """

    config: LoraConfig
    layers: TargetLayers
    tag: str | None


def choose_adapters(module: nn.Module, config: LoraConfig) -> ChosenAdapters:
    """Find what a config asks for in a whole model, which may be on the meta device. Called by all ranks.

    Raises:
        ValueError: a target names nothing that can be adapted.
        CheckpointError: there is no such checkpoint, or it holds no adapter.
    """
    config, tag = config_of_checkpoint(config)
    return ChosenAdapters(config, find_target_layers(module, config) if config.enable_lora else {}, tag)


def adapt_model(model: NxDModel, chosen: ChosenAdapters) -> None:
    """Add adapters to a model, and fill them from their checkpoint if they have one. Called by all ranks.

    Raises:
        CheckpointError: the checkpoint is another model's.
    """
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
    check_names(checkpoint.tensors, into, further_names(model.pipeline), where, coordinator, can_be_lax=False)
    nxd_ckpt.load(root, chosen.tag, into=into, strict=False, convert_dtype=True)


@contextmanager
def weights_to_save(lora: LoraModel | None, coordinator: Coordinator, doing: str) -> Iterator[None]:
    """Within it the weights are as the config says that they are saved. Called by all ranks.

    Raises:
        ValueError: a weight to be merged is tied to another, or adapters are merged and are not to be; on all ranks.
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


def saved_tensors(lora: LoraModel | None, state: CheckpointState) -> CheckpointState:
    """Those that are saved: all, the adapter's, or with merged weights those of an ordinary model.

    What is merged has come to its end, so the states that an optimizer has for it are left out as well.
    """
    if lora is None or (lora.lora_config.save_lora_base and not lora.lora_config.merge_lora):
        return state
    if lora.lora_config.merge_lora:
        merged = set(adapter_names(lora, with_biases=False))
        return {name: tensor for name, tensor in state.items() if owner_of(name) not in merged}
    adapter = set(adapter_names(lora))
    return {name: tensor for name, tensor in state.items() if kind_of(name) != "model" or name in adapter}


def describe_adapter(lora: LoraModel | None) -> Mapping[str, Any] | None:
    """What a checkpoint says of the adapter in it; None if there is none. Called by all ranks."""
    if lora is None or lora.lora_config.merge_lora:
        return None
    return {"adapter": adapter_config(lora), "has_base": lora.lora_config.save_lora_base}


def write_description(description: Mapping[str, Any] | None, lora: LoraModel | None, root: str, tag: str) -> None:
    """Write it beside the checkpoint's files as well, if the config says so. Called by one rank, after the commit."""
    if description is None or lora is None or lora.lora_config.save_lora_config_adapter:
        return
    write_text(f"{root}/{tag}/{ADAPTER_FOLDER}", CONFIG_FILE, json.dumps(description["adapter"], indent=2) + "\n")


def settle_adapters(lora: LoraModel | None, objects: Any) -> None:
    """After a load: where the checkpoint held a model without adapters, these begin anew."""
    if lora is not None and not _has_adapter(objects):
        lora.reset()


def wanted_tensors(lora: LoraModel | None, objects: Any, state: CheckpointState, where: str) -> CheckpointState:
    """Those of a model that a checkpoint is to fill.

    Args:
        lora: knows the model's adapters, if it has any.
        objects: the checkpoint's.
        state: all tensors of the model.
        where: the checkpoint, for messages.

    Raises:
        CheckpointError: it holds adapters only, and the model has none.
        ValueError: its adapters have another scale than the model's.
    """
    if lora is None:
        if _has_adapter(objects) and not has_base(objects):
            raise CheckpointError(
                f"{where} holds an adapter only; make the model with lora_config, and load the base model on its own"
            )
        return state
    if lora.is_merged:
        raise CheckpointError("the adapter is merged into the model's weights; unmerge() before loading")
    if not _has_adapter(objects):
        factors = set(adapter_names(lora, with_biases=False))
        return {name: tensor for name, tensor in state.items() if name not in factors}
    check_same_scale(lora, config_from_adapter_config(objects[OBJECT_KEY]["adapter"]), where)
    return state if has_base(objects) else _adapter_of(lora, state)


def _has_adapter(objects: Any) -> bool:
    return isinstance(objects, dict) and OBJECT_KEY in objects


def _adapter_of(lora: LoraModel, state: CheckpointState) -> CheckpointState:
    return {name: state[name] for name in adapter_names(lora)}
