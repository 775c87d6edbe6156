"""`save_pretrained`: writes a model of any layout as a Hugging Face folder, with one tensor in memory at a time."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt.interop import TensorSource, read_companions, write_companions, write_hugging_face
from nxd_ckpt.interop.huggingface.reading import INDEX_FILE, SINGLE_FILE
from nxd_ckpt.interop.huggingface.writing import parse_size
from nxd_ckpt.interop.source import read_whole
from nxd_ckpt.sharded_tensor import as_sharded_state
from nxd_state import Group, get_world_group, is_transformers_model, model_parallel_is_initialized
from torch import Tensor, nn

from nxd_engine.checkpoints.state import model_state, saved_here
from nxd_engine.hugging_face.conversion import Shapes, reference_model
from nxd_engine.hugging_face.folder import PathLike, write_config
from nxd_engine.hugging_face.gathering import GatheredTensors, gathered
from nxd_engine.hugging_face.loading import check_dtype, read_model_config, stored_shapes
from nxd_engine.hugging_face.rearrangement import RearrangedSource, inverse
from nxd_engine.rank_sync import run_or_raise_peer_error
from nxd_engine.unwrap import plain_model

# A folder with any of these files holds a model, whose config must not be replaced.
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
    """Write a model of any layout as a Hugging Face folder that transformers can load. Called by all ranks.

    Rank 0 writes; the others send it their parts, tensor by tensor. Rank 0 needs memory for the largest tensor.

    Args:
        model: the model, see `load_pretrained`.
        folder: the new folder, needed on rank 0 only; created if missing.
        like: the folder that the model was loaded from; the new one gets its tensor names and config, and copies of
            its tokenizer, processor and generation files. If None, tensors have transformers' own names.
        config: a transformers config, or the content of a `config.json`, which must name the `architectures`; default:
            the config of `like`, or of the model.
        dtype: dtype of floating-point tensors; unchanged if None.
        max_shard_size: maximum size of the tensors in one file, such as "5GB" or "500MiB".

    Raises:
        ValueError: invalid `dtype` or `max_shard_size`, on all ranks; or the folder already holds a model, or there is
            no config, on rank 0.
        RuntimeError: another rank failed; on every rank.
    """
    check_dtype(dtype)
    parse_size(max_shard_size)
    with _tensors_of_all_ranks(model) as everything:
        if everything is not None:
            content = config_content(config, like, model)
            stored = as_stored(everything, content, None if like is None else stored_shapes(like))
            companions = {} if like is None else read_companions(like)
            write_folder(stored, folder, content, companions, dtype=dtype, max_shard_size=max_shard_size)


def whole_state_dict(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Return the whole tensors of a model of any layout on rank 0, and an empty dict on others. Called by all ranks.

    Args:
        model: the model, see `load_pretrained`.
        wanted: says by a tensor's name, which is that of the unsharded model, whether to return it.

    Returns:
        Tensors on the CPU, by name; rank 0 needs memory for all of them.

    Raises:
        RuntimeError: another rank failed; on every rank.
    """
    with _tensors_of_all_ranks(model) as everything:
        if everything is None:
            return {}
        return {name: read_whole(everything, name) for name in everything.tensors if wanted(name)}


def _tensors_of_all_ranks(model: nn.Module) -> AbstractContextManager[GatheredTensors | None]:
    module = plain_model(model)
    state = run_or_raise_peer_error(
        "reading a part of the model", lambda: as_sharded_state(saved_here(module, model_state(module)))
    )
    return gathered(state, get_world_group() if model_parallel_is_initialized() else Group.solo("world"))


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
        stored: the tensors, under their names in files.
        folder: the new folder; created if missing.
        config: content of its `config.json`, to which the dtype is added.
        companions: tokenizer, processor and generation files by name, see `read_companions`.
        dtype: see `save_pretrained`.
        max_shard_size: see `save_pretrained`.

    Raises:
        ValueError: the folder already holds a model, or `dtype` or `max_shard_size` is invalid.
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
    """Return the content for `config.json`."""
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
    """Return a model's tensors with the names and shapes that they have in files.

    Args:
        source: source of the model's tensors.
        config: content of the model's `config.json`.
        shapes: names and shapes in an existing folder of the model; transformers' own if None.
    """
    reference = reference_model(config)
    if reference is None:
        return source
    shapes = reference.stored_shapes() if shapes is None else shapes
    made = reference.arrange(shapes).tensors
    missing = sorted(made.keys() - source.tensors.keys())
    further = sorted(source.tensors.keys() - made.keys())
    if missing or further:
        advice = "pass the config of this model"
        if any(name.endswith(".gate_up_proj.weight") for name in further):
            advice += ", or split a Llama's gate_up_proj by `nxd ckpt convert FOLDER OUT --to hf --sharding llama`"
        raise ValueError(
            f"the model does not match its config: it lacks {missing[:5]} and also has {further[:5]}; {advice}"
        )
    for name, tensor in made.items():
        if tensor.shape != source.tensors[name].global_shape:
            raise ValueError(
                f"the model does not match its config: {name} is {list(source.tensors[name].global_shape)}, and "
                f"{list(tensor.shape)} according to the config; pass the config of this model"
            )
    return RearrangedSource(source, inverse(made, shapes))


def _dtype_entry(config: Mapping[str, Any], stored: TensorSource, dtype: torch.dtype | None) -> dict[str, str]:
    """The dtype entry of `config.json`, under the key that it already has."""
    if dtype is None:
        dtype = next((info.dtype for info in stored.tensors.values() if info.dtype.is_floating_point), torch.float32)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {key: str(dtype).removeprefix("torch.")}
