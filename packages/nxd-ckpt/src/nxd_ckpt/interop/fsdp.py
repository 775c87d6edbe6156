"""Checkpoints of FSDP2 training, with weights and states under the names that nxd-engine and nxd-trainer use.

- A folder of `torch.distributed.checkpoint.save` with the state dicts of model and optimizer, or of torchtitan.
- transformers' Trainer and accelerate: `SHARDED_STATE_DICT` (two such folders) and `FULL_STATE_DICT` (two files).
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import has_file
from nxd_ckpt.interop.source import TensorSource
from nxd_ckpt.interop.torch_files import (
    OPTIMIZER_PREFIX,
    FilesOfTensors,
    load_mapping,
    plain_tensor,
    tensors_of_states,
)
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import Shard

if TYPE_CHECKING:
    from nxd_ckpt.interop.torch_dcp import TorchDcpFolder

SHARDED_MODEL, SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
FULL_MODEL, FULL_OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"
_METADATA = ".metadata"

_FLAT_STATE = re.compile(r"state\.(.+)\.([^.]+)")

Path = tuple[str | int, ...]  # the keys by which a tensor was reached in the saved state


def is_fsdp(folder: str) -> bool:
    """Whether a folder has the layout of accelerate for FSDP."""
    return has_file(os.path.join(folder, SHARDED_MODEL), _METADATA) or has_file(folder, FULL_MODEL)


def open_fsdp(folder: "str | os.PathLike[str]") -> TensorSource:
    """Open what FSDP2 training saved, with logical names: `<parameter>`, and `optimizer/<parameter>/<key>`.

    Tensors of other dicts, such as those of a scheduler, are left out. Nothing is unpickled without restrictions.

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
        return _open_sharded(path, [open_torch_dcp(path)])
    if not is_fsdp(path):
        raise CheckpointError(f"{path} holds neither {_METADATA} nor {SHARDED_MODEL} nor {FULL_MODEL}; pass the folder")
    parts = [os.path.join(path, name) for name in (SHARDED_MODEL, SHARDED_OPTIMIZER)]
    return _open_sharded(path, [open_torch_dcp(part) for part in parts if os.path.isdir(part)])


def _open_full(folder: str) -> TensorSource:
    model = os.path.join(folder, FULL_MODEL)
    values = {name: plain_tensor(value, f"{name!r} in {model}") for name, value in load_mapping(model).items()}
    if has_file(folder, FULL_OPTIMIZER):
        path = os.path.join(folder, FULL_OPTIMIZER)
        states = dict(tensors_of_states(load_mapping(path).get("state"), path))
        owners = {name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")[0] for name in states}
        _check_owners(folder, owners - values.keys())
        values |= states
    return FilesOfTensors(values)


def _check_owners(folder: str, lacking: Set[str]) -> None:
    if lacking:
        raise CheckpointError(
            f"{folder} holds optimizer states of {min(lacking)!r}, but no weight of that name; save model and "
            "optimizer by torch's get_state_dict, which names both alike"
        )


def _open_sharded(folder: str, sources: "Sequence[TorchDcpFolder]") -> TensorSource:
    stored = {path: (source, name) for source in sources for name, path in source.paths.items()}
    states = _states(stored)
    others = [path for path in stored if path not in states and not _is_of_group(path)]
    owners = {owner for owner, _ in states.values()}
    weights = _weights(others, owners)
    _check_owners(folder, owners - weights.keys())
    chosen = {name: stored[path] for name, path in weights.items()}
    chosen |= {f"{OPTIMIZER_PREFIX}{owner}/{key}": stored[path] for path, (owner, key) in states.items()}
    objects = {key: value for source in sources for key, value in (source.objects or {}).items()}
    return _Renamed(chosen, objects or None)


@dataclass(frozen=True)
class _Renamed:
    """Tensors by logical names: the folder that each is in, and its name there."""

    places: "Mapping[str, tuple[TorchDcpFolder, str]]"
    objects: Any

    is_mapped = False

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {logical: source.tensors[name] for logical, (source, name) in self.places.items()}

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        source, stored = self.places[name]
        return source.shards(stored, box)


def _states(paths: Iterable[Path]) -> dict[Path, tuple[str, str]]:
    """Return parameter and key of each state: below "state", or flat in a dict that holds only states and groups."""
    found: dict[Path, tuple[str, str]] = {}
    by_dict: dict[Path, list[Path]] = {}
    for path in paths:
        by_dict.setdefault(path[:-1], []).append(path)
        if path[-3:-2] == ("state",):
            found[path] = (str(path[-2]), str(path[-1]))
    for in_dict in by_dict.values():
        flat = {path: _FLAT_STATE.fullmatch(str(path[-1])) for path in in_dict}
        if all(match or _is_of_group(path) for path, match in flat.items()):
            found |= {path: (match[1], match[2]) for path, match in flat.items() if match}
    return found


def _is_of_group(path: Path) -> bool:
    return "param_groups" in path or str(path[-1]).startswith("param_groups.")


def _weights(paths: Sequence[Path], owners: set[str]) -> dict[str, Path]:
    """Return the weights by name: those in the dict with the most owners of states.

    Without states it is the dict "model", or else the innermost dict that all are in.
    """
    if owners:
        one = min(owners)
        at = {path[:depth]: None for path in paths for depth in range(len(path)) if _name(path[depth:]) == one}
        return max((_below(start, paths) for start in at), key=lambda named: len(owners & named.keys()), default={})
    models = (path[: path.index("model") + 1] for path in paths if "model" in path[:-1])
    start = next(models, None)
    return _below(_common_start([path[:-1] for path in paths]) if start is None else start, paths)


def _below(at: Path, paths: Iterable[Path]) -> dict[str, Path]:
    return {_name(path[len(at) :]): path for path in paths if path[: len(at)] == at}


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _common_start(paths: Sequence[Path]) -> Path:
    equal = takewhile(lambda keys: len(set(keys)) == 1, zip(*paths, strict=False))
    return tuple(keys[0] for keys in equal)
