"""Writing a checkpoint as a Hugging Face folder, which transformers loads.

A checkpoint's tensors already have the names and shapes of the Hugging Face model in memory; where its files differ,
`nxd_trainer.hugging_face` converts them.
"""

from pathlib import Path

import torch

from nxd_trainer.api.checkpoint_tags import open_own
from nxd_trainer.hugging_face.folder import read_config
from nxd_trainer.hugging_face.loading import stored_shapes
from nxd_trainer.hugging_face.saving import as_stored, write_folder
from nxd_trainer.model_description import BYTES, ModelDescription, description_of
from nxd_trainer.model_weights import model_weights


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
    trainer whose model is one of transformers. A LoRA adapter beside its base model is merged into it. Memory: the
    largest tensor.

    Args:
        folder: of checkpoints.
        target: the folder to write; made if need be.
        tag: the newest complete one if None.
        like: a folder of the same model, whose config, names of tensors and files of the tokenizer the new one
            gets. If None, what the checkpoint says of itself.
        dtype: of the written tensors; the checkpoint's if None.
        max_shard_size: most bytes of tensors in one file, such as "5GB" or "500MiB".

    Returns:
        The target folder.

    Raises:
        ValueError: the target already holds a model, or the checkpoint does not say of which model it is.
        nxd_ckpt.CheckpointError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = open_own(folder, tag)
    if like is None:
        description = description_of(checkpoint)
    else:
        description = ModelDescription(read_config(like), folder=str(like), stored_shapes=stored_shapes(like))
    origins = [it for it in (description.folder, description.tokenizer) if it is not None and it != BYTES]
    companions = next((it for it in origins if Path(it).exists()), None)
    write_folder(
        as_stored(model_weights(checkpoint, description), description.config, description.stored_shapes),
        target,
        description.config,
        companions=companions,
        dtype=dtype,
        max_shard_size=max_shard_size,
    )
    return Path(target)
