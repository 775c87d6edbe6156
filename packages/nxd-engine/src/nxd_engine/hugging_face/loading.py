"""Streams a folder of safetensors into a model's shards, or into a checkpoint.

`load_pretrained` fills a model, each rank reading only its bytes; `import_hugging_face` writes a checkpoint without a
model in memory.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt.interop import TensorSource, as_extra, open_hugging_face, read_companions, save_source
from nxd_ckpt.sharded_tensor import as_sharded
from nxd_layers.hf import param_init_fn_of
from nxd_pipeline import NxDPPModel
from nxd_state import (
    all_gather_object,
    get_device,
    get_world_group,
    is_transformers_model,
    model_parallel_is_initialized,
    move_model_to_device,
    owned_range,
    values_changed,
)
from torch import nn

from nxd_engine.checkpoints.fill import fill_state, same_values
from nxd_engine.checkpoints.model_description import ModelDescription, tokenizer_in
from nxd_engine.checkpoints.state import CheckpointState, model_state, parameters_in_checkpoint
from nxd_engine.hugging_face.conversion import Shapes, reference_model
from nxd_engine.hugging_face.folder import PathLike, read_config
from nxd_engine.hugging_face.rearrangement import Rearranged, RearrangedSource
from nxd_engine.logs import get_logger
from nxd_engine.rank_sync import run_or_raise_peer_error
from nxd_engine.unwrap import plain_model

_NUM_SAMPLES, _SAMPLE_BYTES = 33, 4096  # spread over a file from its first to its last bytes


def load_pretrained(
    model: nn.Module,
    folder: PathLike,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    may_lack: Collection[str] = (),
    left_out: Sequence[str] = (),
) -> list[str]:
    """Fill a model of any layout with the weights of a Hugging Face folder. Called by all ranks.

    Each rank reads only the boxes that it holds; padding is not changed. If transformers is installed, tensors that it
    renames or fuses between files and memory are converted; a tied weight may be stored under any of its names. Memory:
    this rank's part of the model, and 16 MiB.

    Args:
        model: result of `nxd_layers.hf.parallelize`, `initialize_parallel_model`, `NxDPPModel`, or any other module
            whose logical tensors have the folder's names. A model on the meta device is allocated here, on this rank's
            device; pipeline stages already have memory.
        folder: a folder with `config.json` and `model.safetensors`, or several such files and their index.
        dtype: new dtype of the floating-point parameters; unchanged if None. Values are converted.
        strict: require the model and the folder to have the same tensors. Otherwise missing tensors keep their values.
        may_lack: names of tensors that may be missing even if `strict`, such as those of adapters.
        left_out: paths of modules and parameters that the folder has, but the model may lack even if `strict`.

    Returns:
        The sorted names of this rank's tensors that the folder lacks.

    Raises:
        ValueError: names, shapes or dtypes do not fit, or a tensor needs an unknown conversion; on every rank, with
            the tensors' names.
        CheckpointError: the folder holds no safetensors, or they are damaged.
        RuntimeError: another rank could not read the folder.
    """
    check_dtype(dtype)
    module = plain_model(model)
    found = run_or_raise_peer_error(f"opening {folder}", lambda: model_tensors(folder))
    on_meta = run_or_raise_peer_error("making room for the weights", lambda: make_room(module, dtype))
    state, source = model_state(module), found.source
    missing = sorted(state.keys() - source.tensors.keys())
    needed = on_meta.union(name for name in missing if strict and name not in may_lack)
    lacking = [name for name in missing if name in needed]
    outside = [name for name in source.tensors if any(f"{name}.".startswith(f"{path}.") for path in left_out)]
    _agree(folder, source, state, unexpected=found.unexpected, lacking=lacking, strict=strict, not_needed=outside)
    run_or_raise_peer_error(f"reading {folder}", lambda: fill_state(source, state))
    values_changed(it for _, it in parameters_in_checkpoint(module))
    return missing


def import_hugging_face(
    folder: PathLike, checkpoints: PathLike, tag: str = "imported", *, dtype: torch.dtype | None = None
) -> None:
    """Write a folder's weights as the checkpoint `tag`, tensor by tensor. Needs no process group.

    The tensors have the names and shapes of the unsharded model, so `nxd_ckpt.load` and `load_checkpoint` fill a model
    of any layout with them. The checkpoint also holds the config, the tokenizer, the generation config and the names in
    the folder's files, see `ModelDescription`. Memory: mapped files, and one tensor.

    Args:
        folder: a folder as for `load_pretrained`.
        checkpoints: the folder of checkpoints; created if missing.
        tag: name of the new checkpoint.
        dtype: dtype of floating-point tensors; unchanged if None.

    Raises:
        ValueError: invalid `dtype`; transformers rejects the config, or the tensors do not match it or need an unknown
            conversion; or a tokenizer file is a link that leads out of the folder.
        CheckpointError: the folder holds no safetensors, they are damaged, or the tag exists.
    """
    check_dtype(dtype)
    config = read_model_config(folder)
    source = whole_model_tensors(folder)
    origin = str(Path(folder).resolve())
    description = ModelDescription(config, tokenizer_in(origin), origin, stored_shapes(folder))
    described = RearrangedSource(source.source, source.rearranged, description.as_objects())
    save_source(described, checkpoints, tag, dtype=dtype, extra=as_extra(read_companions(folder)))


@dataclass(frozen=True)
class FolderTensors:
    """A folder's tensors with the names and shapes that they have in the model.

    Attributes:
        source: the tensors.
        unexpected: names in the files that the model does not have.
        missing: names of the model that the files lack.
        misshapen: a description of each tensor whose shape differs from the config's.
    """

    source: RearrangedSource
    unexpected: Sequence[str]
    missing: Sequence[str]
    misshapen: Sequence[str]


def read_model_config(folder: PathLike) -> dict[str, Any]:
    """Read a folder's config, and untie weights that have different values in the files, as transformers does.

    Raises:
        ValueError: there is no config, or it ties weights that differ and cannot be untied.
        CheckpointError: the folder holds no safetensors, or they are damaged.
    """
    config, problem = _checked_config(folder)
    if problem:
        get_logger("nxd_engine").warning(f"{problem}: they are not tied here (tie_word_embeddings=false)")
    return config


def _checked_config(folder: PathLike) -> tuple[dict[str, Any], str]:
    """Return the config, untied if the weights differ, and the reason; the reason is empty if it is unchanged."""
    config = read_config(folder)
    if config.get("tie_word_embeddings") is False:
        return config, ""
    stored = open_hugging_face(folder)
    shapes = {name: info.global_shape for name, info in stored.tensors.items()}
    differing = _differing_ties(config, stored, shapes)
    if not differing:
        return config, ""
    untied = _without_ties(config)
    problem = (
        f"{folder}: the config ties {' and '.join(differing)} to another weight, but the files have a different value"
    )
    if _differing_ties(untied, stored, shapes):
        raise ValueError(f"{problem}; correct the config, or remove the second one from the files")
    return untied, problem


def _differing_ties(config: Mapping[str, Any], stored: TensorSource, shapes: Shapes) -> list[str]:
    """Return the names of tensors that a config ties to others, but whose stored values differ."""
    reference = reference_model(config)
    if reference is None:  # then the model's names are the files' names
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.get("tie_word_embeddings") else {}
        doubled = {name for name, first in tied.items() if name in shapes and first in shapes}
        return [name for name in doubled if not same_values(stored, name, tied[name])]
    arrangement = reference.arrange(shapes)
    both = RearrangedSource(stored, {**arrangement.tensors, **arrangement.doubled})
    return [name for name in arrangement.doubled if not same_values(both, name, reference.tied[name])]


def _without_ties(config: Mapping[str, Any]) -> dict[str, Any]:
    """Set `tie_word_embeddings=False` in a config and in the nested configs that have the key."""
    inner = {
        key: _without_ties(value)
        for key, value in config.items()
        if isinstance(value, Mapping) and (key == "text_config" or "tie_word_embeddings" in value)
    }
    return {**config, **inner, "tie_word_embeddings": False}


def model_tensors(folder: PathLike) -> FolderTensors:
    """Open a folder. If transformers is missing or does not know the architecture, names stay as stored.

    Raises:
        ValueError: there is no config, or a tensor needs an unknown conversion.
        CheckpointError: the folder holds no safetensors, or they are damaged.
    """
    stored = open_hugging_face(folder)
    reference = reference_model(_checked_config(folder)[0])
    shapes = {name: info.global_shape for name, info in stored.tensors.items()}
    if reference is None:
        unchanged = {name: Rearranged.whole(name, shape) for name, shape in shapes.items()}
        return FolderTensors(RearrangedSource(stored, unchanged), [], [], [])
    arrangement = reference.arrange(shapes)
    missing = sorted(reference.names - arrangement.tensors.keys())
    source = RearrangedSource(stored, arrangement.tensors)
    return FolderTensors(source, arrangement.unexpected, missing, reference.misshapen(arrangement))


def whole_model_tensors(folder: PathLike) -> RearrangedSource:
    """Open a folder that must hold exactly the tensors of its model.

    Raises:
        ValueError: see `model_tensors`; or the tensors do not match the config.
        CheckpointError: see `model_tensors`.
    """
    found = model_tensors(folder)
    if found.missing or found.unexpected:
        raise ValueError(
            f"{folder} does not match its config: it lacks {list(found.missing[:5])} and also has "
            f"{list(found.unexpected[:5])}; use the folder of a whole model"
        )
    if found.misshapen:
        raise ValueError(f"{folder} does not match its config: {'; '.join(found.misshapen[:5])}")
    return found.source


def make_room(module: nn.Module, dtype: torch.dtype | None) -> set[str]:
    """Convert a model's parameters, allocate those on the meta device, and fill buffers that no file holds.

    Returns:
        The names of the tensors that were on the meta device.
    """
    for parameter in module.local_parameters() if isinstance(module, NxDPPModel) else module.parameters():
        if dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype:
            if owned_range(parameter) is not None:
                raise ValueError(
                    f"dtype={dtype} cannot be given to a model whose parameters are sharded over the replicas (ZeRO-3) "
                    f"in {parameter.dtype}; make the model in that dtype"
                )
            parameter.data = parameter.data.to(dtype)
    if isinstance(module, NxDPPModel):
        return set()
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    on_meta = {name for name, tensor in named.items() if tensor.is_meta}
    not_stored = on_meta - module.state_dict(keep_vars=True).keys()
    if on_meta:
        move_model_to_device(module, get_device())
    for path in {name.rpartition(".")[0] for name in not_stored}:
        if not is_transformers_model(module):
            raise ValueError(
                f"{path or type(module).__name__} has buffers on the meta device that are not stored: "
                f"{sorted(not_stored)[:3]}; create the model with parameters_on_meta, which does not move buffers"
            )
        param_init_fn_of(module)(module.get_submodule(path))
    return on_meta


def _agree(
    folder: PathLike,
    source: TensorSource,
    state: CheckpointState,
    *,
    unexpected: Sequence[str],
    lacking: list[str],
    strict: bool,
    not_needed: Collection[str],
) -> None:
    """Raise ValueError on every rank if the folder does not fit on any of them."""
    shapes = {name: as_sharded(name, tensor).global_shape for name, tensor in state.items()}
    problems = [
        f"{name!r} has shape {list(source.tensors[name].global_shape)} in the folder, {list(shape)} in the model"
        for name, shape in shapes.items()
        if name in source.tensors and source.tensors[name].global_shape != shape
    ]
    problems += [f"{name!r} is not in the folder" for name in lacking]
    views = [(list(state), problems)]
    if model_parallel_is_initialized():
        views = all_gather_object(views[0], get_world_group())
    everyone = {problem: None for _, found in views for problem in found}
    if strict:
        wanted = {name for names, _ in views for name in names}.union(not_needed)
        names = [*unexpected, *(name for name in source.tensors if name not in wanted)]
        everyone |= {f"{name!r} is in the folder, but not in the model": None for name in names}
    if everyone:
        shown = list(everyone)[:20]
        more = [f"and {len(everyone) - len(shown)} more"] if len(everyone) > len(shown) else []
        advice = "; strict=False skips tensors that only one of them has" if strict else ""
        raise ValueError(f"{folder} does not fit the model{advice}:\n  " + "\n  ".join([*shown, *more]))


def stored_shapes(folder: PathLike) -> Shapes:
    """Return the names and shapes of the tensors in a folder's files.

    Raises:
        CheckpointError: the folder holds no safetensors, or they are damaged.
    """
    return {name: info.global_shape for name, info in open_hugging_face(folder).tensors.items()}


def weights_fingerprint(folder: PathLike) -> str:
    """Return a digest of the names and sizes of a folder's weight files, and of samples of their bytes."""
    digest = hashlib.sha256()
    for file in sorted(Path(folder).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for sample in range(_NUM_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def check_dtype(dtype: Any) -> None:
    """Raise ValueError unless `dtype` is a floating-point `torch.dtype` or None."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    raise ValueError(f"dtype={dtype!r} is not a floating-point dtype; use one such as torch.bfloat16, or None")
