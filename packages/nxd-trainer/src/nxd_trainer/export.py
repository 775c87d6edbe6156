"""Writing a checkpoint as a Hugging Face folder, which transformers loads.

A checkpoint's tensors have the names and shapes of the Hugging Face model in memory already; where its files are
otherwise, `nxd_trainer.hugging_face` knows how.
"""

from pathlib import Path
from typing import Any

import nxd_ckpt
import torch
from nxd_ckpt.interop import Selection, TensorSource, from_checkpoint

from nxd_trainer.checkpoint import OPTIMIZER_PREFIX
from nxd_trainer.hugging_face.folder import read_config
from nxd_trainer.hugging_face.importing import OBJECTS_KEY
from nxd_trainer.hugging_face.our_llama import hugging_face_config
from nxd_trainer.hugging_face.saving import as_stored, stored_shapes, write_folder
from nxd_trainer.models import LlamaConfig
from nxd_trainer.recipe import recipe_from_dict


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

    The checkpoint may be of `nxd train`, of `import_hugging_face`, or, with `like`, of any trainer whose model is
    one of transformers. Memory: the largest tensor.

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
    checkpoint = nxd_ckpt.open_checkpoint(folder, tag)
    weights = Selection(from_checkpoint(checkpoint), exclude=[f"{OPTIMIZER_PREFIX}*", "rng/*"])
    objects = checkpoint.objects if isinstance(checkpoint.objects, dict) else {}
    if like is not None:
        config = read_config(like)
        stored: TensorSource = as_stored(weights, config, stored_shapes(like))
        companions: str | Path | None = like
    elif OBJECTS_KEY in objects:
        origin = objects[OBJECTS_KEY]
        config = origin["config"]
        stored = as_stored(weights, config, {name: tuple(shape) for name, shape in origin["tensors"].items()})
        companions = origin["folder"] if Path(origin["folder"]).is_dir() else None
    else:
        config, companions = _own_model(folder, objects)
        stored = weights
    write_folder(stored, target, config, companions=companions, dtype=dtype, max_shard_size=max_shard_size)
    return Path(target)


def _own_model(folder: str | Path, objects: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Config and tokenizer of a run of `nxd train`."""
    if not {"model", "recipe", "end_of_document"} <= objects.keys():
        raise ValueError(
            f"the checkpoint in {folder} does not say of which model it is; give a folder of the same model, with its "
            "config.json (like=, on the command line --like)"
        )
    config = hugging_face_config(LlamaConfig(**objects["model"]), end_token=objects["end_of_document"])
    return config, recipe_from_dict(objects["recipe"]).data.tokenizer
