"""`import_hugging_face`: a Hugging Face folder becomes a checkpoint, which loads at any layout."""

from pathlib import Path
from typing import Any

import torch
from nxd_ckpt.interop import save_source

from nxd_trainer.hugging_face.dtypes import check_dtype
from nxd_trainer.hugging_face.folder import read_config
from nxd_trainer.hugging_face.loading import model_tensors
from nxd_trainer.hugging_face.our_llama import run_objects
from nxd_trainer.hugging_face.rearrangement import RearrangedSource
from nxd_trainer.hugging_face.saving import PathLike, stored_shapes

OBJECTS_KEY = "hugging_face"


def import_hugging_face(
    folder: PathLike, checkpoints: PathLike, tag: str = "imported", *, dtype: torch.dtype | None = None
) -> str | None:
    """Write a model's weights as the checkpoint `tag`, one tensor after the other. Needs no process group.

    Its tensors have the names and shapes of the unsharded model, so that `nxd_ckpt.load` and `load_checkpoint` fill
    a model of any layout with them. It remembers the config, the names in the folder's files and where the folder
    was, for `export_hugging_face`; of a Llama also what `nxd generate` and `nxd train` need. Memory: mapped files,
    and one tensor.

    Args:
        folder: with `model.safetensors`, or several files and their index, and `config.json`.
        checkpoints: the folder of checkpoints; made if missing.
        tag: name of the new one.
        dtype: that floating-point tensors are converted to; as they are if None.

    Returns:
        Why `nxd train` and `nxd generate` cannot run the model; None if they can.

    Raises:
        ValueError: `dtype` is no type, transformers does not take the config, tensors are missing, too many or of other
            shapes than it says, or need a conversion that is not known.
        CheckpointError: the folder holds no safetensors, they are damaged, or the tag is taken.
    """
    check_dtype(dtype)
    config = read_config(folder)
    found = model_tensors(folder)
    if found.missing or found.unexpected:
        raise ValueError(
            f"{folder} is not what its config says: it lacks {list(found.missing[:5])} and has "
            f"{list(found.unexpected[:5])} besides; take the folder of a whole model"
        )
    if found.misshapen:
        raise ValueError(f"{folder} is not what its config says: {'; '.join(found.misshapen[:5])}")
    source = found.source
    dtypes = [info.dtype for info in source.tensors.values() if info.dtype.is_floating_point]
    described = {"config": config, "folder": str(Path(folder).resolve()), "tensors": dict(stored_shapes(folder))}
    objects: dict[str, Any] = {OBJECTS_KEY: described}
    reason = None
    try:
        objects |= run_objects(config, Path(folder), dtypes[0] if dtype is None else dtype)
    except ValueError as error:
        reason = str(error)
    save_source(RearrangedSource(source.source, source.rearranged, objects), checkpoints, tag, dtype=dtype)
    return reason
