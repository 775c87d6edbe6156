"""Checkpoints of FSDP2 training, with weights and states under the names that nxd-engine and nxd-trainer use.

- A folder of `torch.distributed.checkpoint.save` with the state dicts of model and optimizer, or of torchtitan.
- transformers' Trainer and accelerate: `SHARDED_STATE_DICT` (two such folders) and `FULL_STATE_DICT` (two files).
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.source import TensorSource
from nxd_ckpt.interop.torch_files import (
    OPTIMIZER_PREFIX,
    FilesOfTensors,
    has_file,
    load_mapping,
    plain_tensor,
    tensors_of_states,
)
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import Shard

SHARDED_MODEL, SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
FULL_MODEL, FULL_OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"
_METADATA = ".metadata"

_STATE = re.compile(r"(?:[^.]+\.)?state\.(.+)\.([^.]+)")  # of the optimizer, below the key that the script chose
_GROUPS = re.compile(r"(?:[^.]+\.)?param_groups\..+")


def is_fsdp(folder: str) -> bool:
    """Whether a folder has the layout of accelerate for FSDP."""
    return has_file(os.path.join(folder, SHARDED_MODEL), _METADATA) or has_file(folder, FULL_MODEL)


def open_fsdp(folder: "str | os.PathLike[str]") -> TensorSource:
    """Open what FSDP2 training saved, with logical names: `<parameter>`, and `optimizer/<parameter>/<key>`.

    Other tensors, such as those of a scheduler, are left out. Nothing is unpickled without restrictions.

    Args:
        folder: a folder of `torch.distributed.checkpoint.save`, or `checkpoint-N` of transformers' Trainer, or what
            accelerate's `save_state` wrote.

    Raises:
        CheckpointError: it is none of these, or damaged, or a file asks for something that is not allowed.
    """
    path = os.fspath(folder)
    if has_file(path, FULL_MODEL):
        return _open_full(path)
    from nxd_ckpt.interop.torch_dcp import open_torch_dcp  # noqa: PLC0415 - it imports as much again as torch

    if has_file(path, _METADATA):
        return _TrainingNames([open_torch_dcp(path)])
    if not is_fsdp(path):
        raise CheckpointError(f"{path} holds neither {_METADATA} nor {SHARDED_MODEL} nor {FULL_MODEL}; pass the folder")
    parts = [os.path.join(path, name) for name in (SHARDED_MODEL, SHARDED_OPTIMIZER)]
    return _TrainingNames([open_torch_dcp(part) for part in parts if has_file(part, _METADATA)])


def _open_full(folder: str) -> TensorSource:
    model = os.path.join(folder, FULL_MODEL)
    values = {name: plain_tensor(value, f"{name!r} in {model}") for name, value in load_mapping(model).items()}
    if has_file(folder, FULL_OPTIMIZER):
        path = os.path.join(folder, FULL_OPTIMIZER)
        values |= tensors_of_states(load_mapping(path).get("state"), path)
    return FilesOfTensors(values)


@dataclass(frozen=True)
class _TrainingNames:
    """The tensors of sources with torch's names, by logical names."""

    sources: Sequence[TensorSource]

    is_mapped = False

    @cached_property
    def _places(self) -> dict[str, tuple[TensorSource, str]]:
        stored = {name: source for source in self.sources for name in source.tensors}
        owners = {match[1] for name in stored if (match := _STATE.fullmatch(name))}
        states = {name: match for name in stored if (match := _STATE.fullmatch(name))}
        weights = [name for name in stored if name not in states and not _GROUPS.fullmatch(name)]
        prefix = "model." if not owners.intersection(weights) and _is_below_model(weights, owners) else ""
        chosen = {name.removeprefix(prefix): name for name in weights if name.startswith(prefix)}
        chosen |= {f"{OPTIMIZER_PREFIX}{match[1]}/{match[2]}": name for name, match in states.items()}
        if unknown := sorted(owner for owner in owners if owner not in chosen):
            raise CheckpointError(f"it holds optimizer states of {unknown[0]!r}, but no such weight; names are unknown")
        return {logical: (stored[name], name) for logical, name in chosen.items()}

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {logical: source.tensors[name] for logical, (source, name) in self._places.items()}

    @property
    def objects(self) -> Any:
        found = {key: value for source in self.sources for key, value in (source.objects or {}).items()}
        return found or None

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        source, stored = self._places[name]
        return source.shards(stored, box)


def _is_below_model(weights: Sequence[str], owners: set[str]) -> bool:
    """Whether weights are below the key "model": states say so; without states, all of them are."""
    if owners:
        return all(f"model.{owner}" in weights for owner in owners)
    return all(name.startswith("model.") for name in weights)
