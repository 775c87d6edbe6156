"""`save_pretrained`: a model of any layout becomes a Hugging Face folder, one tensor in memory at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt.interop import TensorSource, read_companions, write_companions, write_hugging_face
from nxd_ckpt.interop.huggingface.reading import INDEX_FILE, SINGLE_FILE
from nxd_ckpt.interop.huggingface.writing import parse_size
from nxd_ckpt.sharded_tensor import as_sharded_state
from nxd_layers.hf import is_transformers_model
from nxd_state import Group, get_world_group, model_parallel_is_initialized
from torch import nn

from nxd_engine.checkpoints.state import model_state, saved_here
from nxd_engine.hugging_face.conversion import Shapes, reference_model
from nxd_engine.hugging_face.folder import PathLike, write_config
from nxd_engine.hugging_face.gathering import gathered
from nxd_engine.hugging_face.loading import check_dtype, read_model_config, stored_shapes
from nxd_engine.hugging_face.rearrangement import RearrangedSource, inverse
from nxd_engine.rank_sync import on_all_ranks
from nxd_engine.unwrap import plain_model

# A folder with one of them holds a model, whose config must not be replaced.
_WEIGHT_FILES = (SINGLE_FILE, INDEX_FILE, "pytorch_model.bin", "pytorch_model.bin.index.json")


def save_pretrained(
    model: nn.Module,
    folder: PathLike,
    *,
    like: PathLike | None = None,
    config: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model of any layout as a Hugging Face folder, which transformers loads. Called by all ranks.

    Rank 0 writes; the others send it their parts of one tensor after the other. Memory there: the largest tensor.

    Args:
        model: as for `load_pretrained`.
        folder: created if missing; only rank 0 needs it.
        like: the folder that the model was loaded from: the new one gets the same names of tensors, the same
            config, and copies of its files of tokenizer, processor and generation. The names of transformers itself
            if None.
        config: config of transformers, or the content of a `config.json`; default: that of `like`, or of the model. It
            must name the `architectures`, as one does that was read from a folder.
        dtype: dtype for floating-point tensors; unchanged if None.
        max_shard_size: most bytes of tensors in one file, such as "5GB" or "500MiB".

    Raises:
        ValueError: an argument is no type or no size, on all ranks; the folder holds a model already, or there is no
            config, on rank 0.
        RuntimeError: another rank failed; on every rank, since each of them has its part.
    """
    check_dtype(dtype)
    parse_size(max_shard_size)
    module = plain_model(model)
    state = on_all_ranks(
        "read its part of the model", lambda: as_sharded_state(saved_here(module, model_state(module)))
    )
    group = get_world_group() if model_parallel_is_initialized() else Group.solo("world")
    with gathered(state, group) as everything:
        if everything is not None:
            content = config_content(config, like, model)
            stored = as_stored(everything, content, None if like is None else stored_shapes(like))
            companions = {} if like is None else read_companions(like)
            write_folder(stored, folder, content, companions, dtype=dtype, max_shard_size=max_shard_size)


def write_folder(
    stored: TensorSource,
    folder: PathLike,
    config: Mapping[str, Any],
    companions: Mapping[str, bytes],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the folder of a model: config, companions, and the weights last. Called by one process.

    Args:
        stored: tensors under the names that they have in files.
        folder: created if missing.
        config: content of its `config.json`; the type is put in.
        companions: files of tokenizer, processor and generation by their names, see `read_companions`.
        dtype: see `save_pretrained`.
        max_shard_size: see `save_pretrained`.

    Raises:
        ValueError: the folder holds a model already, or an argument is no type or no size.
        CheckpointError: the source cannot be read.
    """
    check_dtype(dtype)
    parse_size(max_shard_size)
    target = Path(folder)
    for taken in _WEIGHT_FILES:
        if (target / taken).exists():
            raise ValueError(f"{target} already holds a {taken}; remove it or choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    write_config(target, {**config, **_dtype_entry(config, stored, dtype)})
    write_companions(companions, target)
    write_hugging_face(stored, target, dtype=dtype, max_shard_size=max_shard_size)


def config_content(config: Any, like: PathLike | None, model: nn.Module) -> dict[str, Any]:
    """The content for `config.json`.

    Raises:
        ValueError: no config is given, or it does not name the architecture.
    """
    if config is None and like is not None:
        return read_model_config(like)
    found = getattr(model, "config", None) if config is None else config
    to_json: Any = getattr(found, "to_json_string", None)  # of transformers' configs
    if isinstance(found, Mapping):
        content = dict(found)
    elif to_json is not None:
        content = json.loads(to_json())
    else:
        raise ValueError(
            f"{type(model).__name__} has no transformers config; pass config=, or like= with the folder that it was "
            "loaded from"
        )
    if not content.get("architectures"):
        if not is_transformers_model(model):
            raise ValueError(
                'the config does not name the model class; set config.architectures, such as ["LlamaForCausalLM"]'
            )
        content["architectures"] = [type(model).__name__]
    return content


def as_stored(source: TensorSource, config: Mapping[str, Any], shapes: Shapes | None = None) -> TensorSource:
    """A model's tensors under the names and in the shapes that they have in files.

    Args:
        source: source of the model's tensors.
        config: content of the model's `config.json`.
        shapes: names and shapes that an existing folder of such a model has; those of transformers itself if None.

    Raises:
        ValueError: the tensors are not those of such a model.
    """
    reference = reference_model(config)
    if reference is None:
        return source
    shapes = reference.stored_shapes() if shapes is None else shapes
    made = reference.arrange(shapes).tensors
    missing = sorted(made.keys() - source.tensors.keys())
    further = sorted(source.tensors.keys() - made.keys())
    if missing or further:
        raise ValueError(
            f"the model does not match its config: it lacks {missing[:5]} and also has {further[:5]}; pass the "
            "config of this model"
        )
    return RearrangedSource(source, inverse(made, shapes))


def _dtype_entry(config: Mapping[str, Any], stored: TensorSource, dtype: torch.dtype | None) -> dict[str, str]:
    """The type as `config.json` names it, under the key that is there already."""
    if dtype is None:
        dtype = next((info.dtype for info in stored.tensors.values() if info.dtype.is_floating_point), torch.float32)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {key: str(dtype).removeprefix("torch.")}
