"""Writing a checkpoint as a Hugging Face folder, which transformers loads.

A checkpoint's tensors already have the names and shapes of the Hugging Face model in memory; where its files differ,
`nxd_engine.hugging_face` converts them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from nxd_ckpt.interop import is_of_tokenizer, read_companions
from nxd_engine.checkpoints.tags import open_own
from nxd_engine.hugging_face.loading import read_model_config, stored_shapes
from nxd_engine.hugging_face.saving import as_stored, write_folder
from nxd_engine.model_description import ModelDescription

from nxd_trainer.opened_model import open_checkpointed_model


def export_hugging_face(
    folder: str | Path,
    target: str | Path,
    tag: str | None = None,
    *,
    like: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write the model of a checkpoint so that `transformers` loads it. Needs no process group.

    The checkpoint may be of `nxd train`, `import_hugging_face`, `save_checkpoint` or Lightning; with `like`, of any
    trainer whose model is one of transformers. A LoRA adapter is merged into its base model, which lies beside it, in
    `like`, or where the checkpoint of `nxd train` says. The tokenizer and its template are those that the checkpoint
    carries, which it was trained with. Memory: the largest tensor.

    Args:
        folder: of checkpoints.
        target: the folder to write; made if need be.
        tag: the newest complete one if None.
        like: a folder of the same model, whose config and names of tensors the new one gets, and the files of the
            tokenizer where the checkpoint carries none. If None, what the checkpoint says of itself.
        dtype: of the written tensors; the checkpoint's if None.
        max_shard_size: most bytes of tensors in one file, such as "5GB" or "500MiB".

    Returns:
        The target folder.

    Raises:
        ValueError: the target already holds a model, or the checkpoint does not say of which model it is; or the base
            of its adapter is not there, or is another one by now.
        nxd_ckpt.CheckpointError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = open_own(folder, tag)
    given = None
    if like is not None:
        given = ModelDescription(read_model_config(like), folder=str(like), stored_shapes=stored_shapes(like))
    opened = open_checkpointed_model(checkpoint, given)
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


def _companions(own: Mapping[str, bytes], like: str | Path | None) -> Mapping[str, bytes]:
    """The files that a checkpoint carries, and what a folder of the same model has besides: one tokenizer of both."""
    beside = {} if like is None else read_companions(like)
    if any(map(is_of_tokenizer, own)):
        beside = {name: content for name, content in beside.items() if not is_of_tokenizer(name)}
    return {**beside, **own}
