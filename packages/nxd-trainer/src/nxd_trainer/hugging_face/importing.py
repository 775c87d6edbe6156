"""`import_hugging_face`: a Hugging Face folder becomes a checkpoint, which loads at any layout."""

from pathlib import Path

import torch
from nxd_ckpt.interop import save_source

from nxd_trainer.hugging_face.dtypes import check_dtype
from nxd_trainer.hugging_face.folder import read_config
from nxd_trainer.hugging_face.loading import model_tensors
from nxd_trainer.hugging_face.rearrangement import RearrangedSource
from nxd_trainer.hugging_face.saving import PathLike, stored_shapes
from nxd_trainer.model_description import ModelDescription, tokenizer_in


def import_hugging_face(
    folder: PathLike, checkpoints: PathLike, tag: str = "imported", *, dtype: torch.dtype | None = None
) -> str | None:
    """Write a model's weights as the checkpoint `tag`, one tensor after the other. Needs no process group.

    Its tensors have the names and shapes of the unsharded model, so that `nxd_ckpt.load` and `load_checkpoint` fill
    a model of any layout with them. It remembers the config, the names in the folder's files and where the folder
    was, see `ModelDescription`. Memory: mapped files, and one tensor.

    Args:
        folder: with `model.safetensors`, or several files and their index, and `config.json`.
        checkpoints: the folder of checkpoints; made if missing.
        tag: name of the new one.
        dtype: that floating-point tensors are converted to; as they are if None.

    Returns:
        Why this package's own Llama, which `nxd serve` runs, cannot be the model; None if it can.

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
    origin = str(Path(folder).resolve())
    description = ModelDescription(config, tokenizer_in(origin), origin, stored_shapes(folder))
    described = RearrangedSource(source.source, source.rearranged, description.as_objects())
    save_source(described, checkpoints, tag, dtype=dtype)
    try:
        description.own_llama()
    except ValueError as error:
        return str(error)
    return None
