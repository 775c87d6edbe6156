"""Exports a checkpoint to a Hugging Face folder, which transformers loads.

A checkpoint's tensors already have the names and shapes of the Hugging Face model in memory; where the files of that
model differ, `nxd_engine.hugging_face` converts them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from nxd_ckpt.interop import from_checkpoint, is_of_tokenizer, read_companions
from nxd_engine.checkpoints.find import open_own
from nxd_engine.checkpoints.merged_weights import ModelTensors, ModelWeights
from nxd_engine.checkpoints.model_description import (
    ModelDescription,
    adapter_in,
    description_of,
    holds_adapter_alone,
)
from nxd_engine.hugging_face.conversion import with_architecture
from nxd_engine.hugging_face.loading import read_model_config, stored_shapes
from nxd_engine.hugging_face.saving import as_stored, write_folder
from nxd_lora import write_peft_files
from nxd_lora.peft_files import TENSOR_FILE

from nxd_trainer.opened_model import open_checkpointed_model


def export_hugging_face(
    folder: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    like: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    averaged: bool = False,
) -> Path:
    """Write the model of a checkpoint so that `transformers` loads it. Needs no process group.

    The checkpoint may come from `nxd train`, `import_hugging_face`, `save_checkpoint` or Lightning; with `like`, from
    any trainer with a transformers model. A LoRA adapter is merged into its base model, which is in the same
    checkpoint, in `like`, or in the folder named by the checkpoint of `nxd train`. The tokenizer and chat template are
    those that the checkpoint carries, which it was trained with. Memory: the largest tensor.

    Args:
        folder: the folder of checkpoints.
        target: the folder to write; created if missing.
        tag: the checkpoint's name; the newest complete one if None.
        like: a folder of the same model, for the config, for tensor names if it holds safetensors, and for the
            tokenizer files if the checkpoint has none. If None, the checkpoint's own description is used.
        dtype: the dtype of the written tensors; the checkpoint's if None.
        max_shard_size: maximum bytes of tensors in one file, such as "5GB" or "500MiB".
        averaged: whether to write the moving average of the weights, which runs with `train.ema_decay` keep.

    Returns:
        The target folder.

    Raises:
        ValueError: the target already holds a model, the checkpoint does not say which model it holds, the base model
            of its adapter is missing or has changed, or it has no average.
        nxd_ckpt.CheckpointError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = open_own(folder, tag)
    given = None
    if like is not None:
        config = with_architecture(read_model_config(like))  # that of a config alone names no class
        given = ModelDescription(config, folder=str(like), stored_shapes=_stored_shapes(like))
    opened = open_checkpointed_model(checkpoint, given, averaged=averaged)
    description = opened.description
    write_folder(
        as_stored(opened.weights, description.config, description.stored_shapes),
        target,
        description.config,
        _companions(description.files, like),
        dtype=dtype,
        max_shard_size=max_shard_size,
    )
    return Path(target)


def export_adapter(folder: str | Path, target: str | Path, tag: str | None = None) -> Path:
    """Write the LoRA adapter of a checkpoint as PEFT's files. Needs no process group.

    Args:
        folder: the folder of checkpoints.
        target: the folder to write; created if missing.
        tag: the checkpoint's name; the newest complete one if None.

    Returns:
        The target folder.

    Raises:
        ValueError: the target already holds an adapter; or the checkpoint holds no adapter, holds it beside its base
            model, or has one of fused expert weights.
        nxd_ckpt.CheckpointError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = open_own(folder, tag)
    where, content = f"checkpoint {checkpoint.tag!r}", adapter_in(checkpoint)
    if content is None:
        raise ValueError(f"{where} holds no LoRA adapter; leave --adapter out to export the model")
    if not holds_adapter_alone(checkpoint):
        raise ValueError(
            f"{where} holds the adapter together with its base model (lora.save=both); resume the run with "
            "lora.save=adapter for one more step, and export that, or leave --adapter out to export the merged model"
        )
    if content.get("target_parameters"):
        raise ValueError(
            f"{where} adapts fused expert weights (lora.target_parameters), which --adapter does not write; leave it "
            "out to export the merged model, or call nxd_lora.save_peft_adapter"
        )
    if (Path(target) / TENSOR_FILE).exists():
        raise ValueError(f"{target} already holds an adapter; give another folder")
    initial = description_of(checkpoint).initial
    base = None if initial is None or initial.tag is not None else initial.folder
    stored = ModelWeights(ModelTensors(from_checkpoint(checkpoint)), {})
    shapes = {name: info.global_shape for name, info in stored.tensors.items()}
    tensors = {name: stored.read_box(name, [0] * len(shape), shape) for name, shape in shapes.items()}
    write_peft_files(target, {**content, "base_model_name_or_path": base}, tensors)
    return Path(target)


def _stored_shapes(like: str | Path) -> Mapping[str, tuple[int, ...]] | None:
    """Return the names and shapes in a folder's files, or None if it holds only a config."""
    return stored_shapes(like) if any(Path(like).glob("*.safetensors")) else None


def _companions(own: Mapping[str, bytes], like: str | Path | None) -> Mapping[str, bytes]:
    """Merge a checkpoint's files with those of a folder of the same model; the tokenizer comes from one of them."""
    beside = {} if like is None else read_companions(like)
    if any(map(is_of_tokenizer, own)):
        beside = {name: content for name, content in beside.items() if not is_of_tokenizer(name)}
    return {**beside, **own}
