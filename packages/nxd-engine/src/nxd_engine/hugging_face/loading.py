"""A folder of safetensors streams into a model's shards, or into a checkpoint without a model in memory.

`load_pretrained` is the first, each rank reading only its bytes; `import_hugging_face` the second.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt.interop import TensorSource, as_extra, open_hugging_face, read_companions, save_source
from nxd_ckpt.sharded_tensor import as_sharded
from nxd_layers.hf import is_transformers_model, param_init_fn_of
from nxd_pipeline import NxDPPModel
from nxd_state import (
    all_gather_object,
    get_device,
    get_world_group,
    model_parallel_is_initialized,
    move_model_to_device,
)
from torch import nn

from nxd_engine.checkpoints.fill import fill_state, same_values
from nxd_engine.checkpoints.state import CheckpointState, model_state
from nxd_engine.hugging_face.conversion import Shapes, reference_model
from nxd_engine.hugging_face.folder import PathLike, read_config
from nxd_engine.hugging_face.rearrangement import Rearranged, RearrangedSource
from nxd_engine.logs import get_logger
from nxd_engine.model_description import ModelDescription, tokenizer_in
from nxd_engine.rank_sync import on_all_ranks
from nxd_engine.unwrap import plain_model

_NUM_SAMPLES, _SAMPLE_BYTES = 33, 4096  # of a file, from its first to its last bytes


def load_pretrained(
    model: nn.Module,
    folder: PathLike,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    may_lack: Collection[str] = (),
) -> list[str]:
    """Fill a model with the weights of a Hugging Face folder, whatever its layout. Called by all ranks.

    Of each tensor a rank reads the boxes that it holds; padding is not changed. Names and fusions that transformers
    keeps otherwise in files than in memory are taken care of where transformers is installed; a tied weight may be
    stored under any of its names. Memory: this rank's part of the model, and 16 MiB.

    Args:
        model: result of `nxd_layers.hf.parallelize`, `initialize_parallel_model`, `NxDPPModel`, or any other module
            whose logical tensors have the folder's names. One on the meta device gets its memory here, on this rank's
            device; stages of a pipeline have theirs already.
        folder: with `model.safetensors`, or several files and their index, and `config.json`.
        dtype: dtype of the floating-point parameters afterwards; those of the model if None. Values are converted.
        strict: every tensor of the model must be stored, and every stored one be the model's. Otherwise those that are
            not stored keep their values.
        may_lack: names of the model's tensors that need not be stored in any case, such as those of adapters.

    Returns:
        The names of this rank's tensors that are not stored, sorted; if `strict`, of those that need not be.

    Raises:
        ValueError: names, shapes or types do not fit, or need a conversion that is not known; by name, on every rank.
        CheckpointError: the folder holds no safetensors, or they are damaged.
        RuntimeError: another rank could not read its folder or its part of it.
    """
    check_dtype(dtype)
    module = plain_model(model)
    found = on_all_ranks(f"open {folder}", lambda: model_tensors(folder))
    on_meta = on_all_ranks("make room for the weights", lambda: make_room(module, dtype))
    state, source = model_state(module), found.source
    missing = sorted(state.keys() - source.tensors.keys())
    needed = on_meta.union(name for name in missing if strict and name not in may_lack)
    lacking = [name for name in missing if name in needed]
    _agree(folder, source, state, unexpected=found.unexpected, lacking=lacking, strict=strict)
    on_all_ranks(f"read {folder}", lambda: fill_state(source, state))
    return missing


def import_hugging_face(
    folder: PathLike, checkpoints: PathLike, tag: str = "imported", *, dtype: torch.dtype | None = None
) -> None:
    """Write a model's weights as the checkpoint `tag`, one tensor after the other. Needs no process group.

    Its tensors have the names and shapes of the unsharded model, so that `nxd_ckpt.load` and `load_checkpoint` fill
    a model of any layout with them. It holds the config, the tokenizer and the generation config as well, and remembers
    the names in the folder's files, see `ModelDescription`. Memory: mapped files, and one tensor.

    Args:
        folder: with `model.safetensors`, or several files and their index, and `config.json`.
        checkpoints: the folder of checkpoints; created if missing.
        tag: name of the new one.
        dtype: dtype for floating-point tensors; unchanged if None.

    Raises:
        ValueError: `dtype` is no type, transformers does not take the config, tensors are missing, too many or of other
            shapes than it says, or need a conversion that is not known; or a file of the tokenizer is a link that leads
            out of the folder.
        CheckpointError: the folder holds no safetensors, they are damaged, or the tag is taken.
    """
    check_dtype(dtype)
    config = read_model_config(folder)
    source = whole_model_tensors(folder)
    origin = str(Path(folder).resolve())
    description = ModelDescription(config, tokenizer_in(origin), origin, stored_shapes(folder))
    described = RearrangedSource(source.source, source.rearranged, description.as_objects())
    save_source(described, checkpoints, tag, dtype=dtype, extra=as_extra(read_companions(folder)))


@dataclass(frozen=True)
class ModelTensors:
    """A folder's tensors under the names and in the shapes that they have in the model.

    Attributes:
        source: the tensors.
        unexpected: names in the files that the model does not have.
        missing: names of the model that are not in the files.
        misshapen: description of each tensor whose shape differs from the config's.
    """

    source: RearrangedSource
    unexpected: Sequence[str]
    missing: Sequence[str]
    misshapen: Sequence[str]


def read_model_config(folder: PathLike) -> dict[str, Any]:
    """A folder's config, without a tie that its weights do not have: as transformers does, the weights are believed.

    Raises:
        ValueError: there is no config, or one that ties what differs and cannot be told not to.
        CheckpointError: the folder holds no safetensors, or they are damaged.
    """
    config, told = _believed_config(folder)
    if told:
        get_logger("nxd_engine").warning(f"{told}: they are not tied here (tie_word_embeddings=false)")
    return config


def _believed_config(folder: PathLike) -> tuple[dict[str, Any], str]:
    """The config, and what was not believed of it."""
    config = read_config(folder)
    if config.get("tie_word_embeddings") is False:
        return config, ""
    stored = open_hugging_face(folder)
    shapes = {name: info.global_shape for name, info in stored.tensors.items()}
    differing = _differing_ties(config, stored, shapes)
    if not differing:
        return config, ""
    untied = _without_ties(config)
    told = (
        f"{folder}: the config ties {' and '.join(differing)} to another weight, but the files have a different value"
    )
    if _differing_ties(untied, stored, shapes):
        raise ValueError(f"{told}; correct the config, or remove the second one from the files")
    return untied, told


def _differing_ties(config: Mapping[str, Any], stored: TensorSource, shapes: Shapes) -> list[str]:
    """The names of tensors that a config ties to others, and that are stored with other values than these."""
    reference = reference_model(config)
    if reference is None:  # then names are those of the files
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.get("tie_word_embeddings") else {}
        doubled = {name for name, first in tied.items() if name in shapes and first in shapes}
        return [name for name in doubled if not same_values(stored, name, tied[name])]
    arrangement = reference.arrange(shapes)
    both = RearrangedSource(stored, {**arrangement.tensors, **arrangement.doubled})
    return [name for name in arrangement.doubled if not same_values(both, name, reference.tied[name])]


def _without_ties(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, and those in it that have the key, with `tie_word_embeddings=False`."""
    inner = {
        key: _without_ties(value)
        for key, value in config.items()
        if isinstance(value, Mapping) and (key == "text_config" or "tie_word_embeddings" in value)
    }
    return {**config, **inner, "tie_word_embeddings": False}


def model_tensors(folder: PathLike) -> ModelTensors:
    """Open a folder. Where transformers is missing, or does not know the architecture, names are taken as they are
    stored.

    Raises:
        ValueError: there is no config, or a tensor needs a conversion that is not known.
        CheckpointError: the folder holds no safetensors, or they are damaged.
    """
    stored = open_hugging_face(folder)
    reference = reference_model(_believed_config(folder)[0])
    shapes = {name: info.global_shape for name, info in stored.tensors.items()}
    if reference is None:
        as_they_are = {name: Rearranged.whole(name, shape) for name, shape in shapes.items()}
        return ModelTensors(RearrangedSource(stored, as_they_are), [], [], [])
    arrangement = reference.arrange(shapes)
    missing = sorted(reference.names - arrangement.tensors.keys())
    source = RearrangedSource(stored, arrangement.tensors)
    return ModelTensors(source, arrangement.unexpected, missing, reference.misshapen(arrangement))


def whole_model_tensors(folder: PathLike) -> RearrangedSource:
    """As `model_tensors`, of a folder that has all of them and no others.

    Raises:
        ValueError: as `model_tensors`; or tensors are missing, too many, or of other shapes than the config says.
        CheckpointError: as `model_tensors`.
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
    """Give a model parameters of the wanted type, in memory, and values to buffers that no file holds.

    Returns:
        The names of what was on the meta device.

    Raises:
        ValueError: this is not a transformers model, and it has such buffers on the meta device.
    """
    if dtype is not None:
        _convert_parameters(module, dtype)
    return _give_memory(module)


def _convert_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    parameters = module.local_parameters() if isinstance(module, NxDPPModel) else module.parameters()
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _give_memory(module: nn.Module) -> set[str]:
    """Memory for what is on the meta device, and values for buffers that no file holds; the names of what was there."""
    if isinstance(module, NxDPPModel):
        return set()
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    on_meta = {name for name, tensor in named.items() if tensor.is_meta}
    not_stored = on_meta - module.state_dict().keys()
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
        wanted = {name for names, _ in views for name in names}
        names = [*unexpected, *(name for name in source.tensors if name not in wanted)]
        everyone |= {f"{name!r} is in the folder, but not in the model": None for name in names}
    if everyone:
        shown = list(everyone)[:20]
        more = [f"and {len(everyone) - len(shown)} more"] if len(everyone) > len(shown) else []
        advice = "; strict=False skips tensors that only one of them has" if strict else ""
        raise ValueError(f"{folder} does not fit the model{advice}:\n  " + "\n  ".join([*shown, *more]))


def stored_shapes(folder: PathLike) -> Shapes:
    """Names and shapes of the tensors in a folder's files.

    Raises:
        CheckpointError: the folder holds no safetensors, or they are damaged.
    """
    return {name: info.global_shape for name, info in open_hugging_face(folder).tensors.items()}


def weights_fingerprint(folder: PathLike) -> str:
    """A digest of the names and sizes of a folder's weight files, and of samples of their bytes."""
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
    """Raise ValueError unless it is a floating-point `torch.dtype`, or None, which leaves weights as they are."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    raise ValueError(f"dtype={dtype!r} is not a floating-point dtype; use one such as torch.bfloat16, or None")
