"""Opens a NeuronX Distributed checkpoint: all ranks' files as one set of whole tensors, without loading them.

Tensors that should be equal on all ranks are compared bit by bit, so an undeclared sharding raises an error instead of
returning one rank's values.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.neuronx.optimizer import (
    dcp_parameter_groups,
    parameter_groups,
    placed_dcp_tensors,
    placed_optimizer_tensors,
)
from nxd_ckpt.interop.neuronx.rank_files import (
    BEGUN_MARKER,
    DONE_MARKER,
    USER_CONTENT,
    Rank,
    load_rank_file,
    v1_files,
    v2_files,
)
from nxd_ckpt.interop.neuronx.sharding import Degrees, LocalTensor, SavedBox, Sharding, check_storable, place
from nxd_ckpt.interop.safe_pickle import load_torch_file, load_trusted_torch_file
from nxd_ckpt.interop.source import TensorSource, same_bits
from nxd_ckpt.objects import check_json
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import Shard
from nxd_ckpt.stores import check_tag

_V1_MODEL_KEY = "model"
_V1_OPTIMIZER_KEY = "optimizer"


class _NeuronxCheckpoint:
    is_mapped = True

    def __init__(self, parts: Mapping[str, Sequence[SavedBox]], objects: dict[str, Any]) -> None:
        self._parts = parts
        self.objects = objects
        self.tensors: Mapping[str, TensorInfo] = {name: _agreed_info(name, found) for name, found in parts.items()}

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        first: dict[Box, SavedBox] = {}
        for part in self._parts[name]:
            known = first.setdefault(part.box, part)
            if known is not part and not same_bits(known.tensor, part.tensor):
                raise CheckpointError(
                    f"{name!r} {part.box} differs between {known.rank} and {part.rank}: it is not the same on all "
                    "ranks; declare in `sharding` how it is split. Fused or copied heads are not split evenly: load "
                    "the folder into the model that was saved, or convert it with CheckpointConverterBase of "
                    "neuronx_distributed.scripts.checkpoint_converter; in Python, nxd_ckpt.interop.neuronx.Pieces "
                    "describes them"
                )
        return [Shard(part.tensor, box.offsets) for box, part in first.items()]


@dataclass(frozen=True)
class _Contents:
    """The contents of one checkpoint, in either layout."""

    model: Mapping[Rank, Mapping[str, Any]]
    optimizer: Mapping[Rank, Any]
    dcp_optimizer: TensorSource | None  # of ZeRO-1, in one torch distributed checkpoint
    scheduler: Any


def open_neuronx(
    path: "str | os.PathLike[str]",
    tag: str | None = None,
    *,
    sharding: Mapping[str, Sharding],
    parameter_names: Sequence[str] | Mapping[int, Sequence[str]] | None = None,
    trust_user_content: bool = False,
) -> TensorSource:
    """Open a v2 or v1 checkpoint, plain or xser. Files are unpickled with restrictions, and no code in them is run.

    The files must not change while the result or one of its tensors is in use.

    Args:
        path: v2: the folder of the tags, or one tag's folder; v1: the folder passed to `parallel_layers.save`.
        tag: v2: name of the checkpoint; default: the only complete one.
        sharding: how each tensor is split, by name or shell pattern, such as `LLAMA`; all other tensors must be equal
            on all ranks.
        parameter_names: parameter names in the optimizer's order, as one list or one per pp rank. If given, the
            optimizer state, including that of ZeRO-1, is read as well, as "optimizer/<name>/<key>". State saved with
            `use_zero1_dcp` contains the names and is read with or without them.
        trust_user_content: whether the user content may run any code while it is read: set it only for files that you
            wrote. Otherwise plain values and tensors are read, and anything else is left out with a warning.

    Raises:
        ValueError: the sharding does not match a tensor, or the tag is not allowed.
        CheckpointError: there is no complete checkpoint, or a file is missing, damaged or not allowed.
    """
    folder = os.fspath(path)
    if v1_files(folder):
        contents, user_content = _read_v1(folder), None
    else:
        folder = _v2_folder(folder, tag)
        contents = _read_v2(folder, with_optimizer=parameter_names is not None)
        user_content = _user_content(folder, trust=True) if trust_user_content else _plain_user_content(folder)
    local = [
        LocalTensor(name, rank, tensor) for rank, state in contents.model.items() for name, tensor in _tensors(state)
    ]
    degrees = _degrees(contents.model)
    parts = place(local, sharding, degrees)
    objects = {"scheduler": contents.scheduler, "user_content": user_content}
    if contents.dcp_optimizer is not None:
        parts |= placed_dcp_tensors(contents.dcp_optimizer, local, sharding, degrees)
        objects["optimizer"] = {"param_groups": dcp_parameter_groups(contents.dcp_optimizer)}
    elif parameter_names is not None:
        if not contents.optimizer:
            raise CheckpointError(
                f"{folder} holds no optimizer state; load the model alone: leave out optimizer= of load_checkpoint, "
                "--parameter-names of nxd ckpt, or parameter_names= of open_neuronx"
            )
        parts |= placed_optimizer_tensors(contents.optimizer, local, sharding, degrees, parameter_names)
        objects["optimizer"] = {"param_groups": parameter_groups(contents.optimizer)}
    return _NeuronxCheckpoint(parts, _jsonable(objects))


def complete_tags(path: "str | os.PathLike[str]") -> list[str]:
    """Return the tags of a v2 folder that have both markers, in alphabetical order."""
    folder = os.fspath(path)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if _is_complete(os.path.join(folder, name)))


def read_user_content(path: "str | os.PathLike[str]", tag: str, *, trust: bool = False) -> Any:
    """Return the `user_content` of a v2 checkpoint, or None if it has none.

    Args:
        path: the folder of the tags.
        tag: name of the checkpoint.
        trust: whether the file may run any code while it is read. If False, it may hold only plain values and tensors.

    Raises:
        ValueError: the tag is not allowed.
        CheckpointError: it is damaged, or holds more than plain values without `trust`.
    """
    folder = os.path.join(path, check_tag(tag))
    try:
        return _user_content(folder, trust=trust)
    except CheckpointError as error:
        if trust:
            raise
        raise CheckpointError(f"{error}; if you wrote it, pass trust=True, which lets it run any code") from error


def _v2_folder(path: str, tag: str | None) -> str:
    if tag is None and (_is_complete(path) or os.path.isdir(os.path.join(path, "model"))):
        folder = path
    elif tag is None:
        tags = complete_tags(path)
        if len(tags) != 1:
            there = ", ".join(tags) or "none"
            raise CheckpointError(f"{path} holds {len(tags)} complete checkpoints ({there}); pass the tag of one")
        folder = os.path.join(path, tags[0])
    else:
        folder = os.path.join(path, check_tag(tag))
    if not _is_complete(folder):
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it needs the markers {BEGUN_MARKER!r} and {DONE_MARKER!r}; the "
            "latter is written last"
        )
    return folder


def _is_complete(folder: str) -> bool:
    return all(os.path.isfile(os.path.join(folder, marker)) for marker in (BEGUN_MARKER, DONE_MARKER))


def _read_v2(folder: str, *, with_optimizer: bool) -> _Contents:
    from nxd_ckpt.interop.torch_dcp import open_torch_dcp  # noqa: PLC0415 - it imports as much again as torch

    model = {rank: load_rank_file(file) for rank, file in v2_files(os.path.join(folder, "model")).items()}
    if not model:
        raise CheckpointError(f"{folder} holds no files model/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt")
    optimizer = os.path.join(folder, "optim")
    is_dcp = os.path.isfile(os.path.join(optimizer, ".metadata"))
    optimizer_files = v2_files(optimizer) if with_optimizer and not is_dcp else {}
    scheduler = os.path.join(folder, "scheduler.pt")
    return _Contents(
        model=model,
        optimizer={rank: load_rank_file(file) for rank, file in optimizer_files.items()},
        dcp_optimizer=open_torch_dcp(optimizer) if is_dcp else None,
        scheduler=load_torch_file(scheduler) if os.path.isfile(scheduler) else None,
    )


def _read_v1(folder: str) -> _Contents:
    content = {rank: load_rank_file(file) for rank, file in v1_files(folder).items()}
    model, optimizer = {}, {}
    for rank, state in content.items():
        if not isinstance(state, dict):
            raise CheckpointError(f"{folder}: {rank} saved a {type(state).__name__}, expected a dict")
        model[rank] = state.get(_V1_MODEL_KEY, state)
        if _V1_OPTIMIZER_KEY in state:
            optimizer[rank] = state[_V1_OPTIMIZER_KEY]
    return _Contents(model=model, optimizer=optimizer, dcp_optimizer=None, scheduler=None)


def _user_content(folder: str, *, trust: bool) -> Any:
    path = os.path.join(folder, USER_CONTENT)
    if not os.path.isfile(path):
        return None
    return load_trusted_torch_file(path) if trust else load_torch_file(path)


def _plain_user_content(folder: str) -> Any:
    try:
        return _user_content(folder, trust=False)
    except CheckpointError as error:
        warnings.warn(
            f"leaving out {USER_CONTENT}: {error}; if you wrote it, pass trust_user_content=True "
            "(--trust-user-content), which lets it run any code",
            stacklevel=3,
        )
    return None


def _tensors(state: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of one rank's model; other values in a module's state are left out with a warning."""
    if not isinstance(state, dict):
        raise CheckpointError(f"a model's state is a {type(state).__name__}, expected a dict of tensors")
    others = [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor) and value is not None]
    if others:
        warnings.warn(f"leaving out values that are not tensors: {', '.join(others)}", stacklevel=4)
    tensors = [(str(name), value) for name, value in state.items() if isinstance(value, torch.Tensor)]
    for name, tensor in tensors:
        check_storable(repr(name), tensor)
    return tensors


def _degrees(ranks: Mapping[Rank, Any]) -> Degrees:
    return Degrees(
        tp_size=1 + max(rank.tp for rank in ranks), tp_rank=0, ep_size=1 + max(rank.ep for rank in ranks), ep_rank=0
    )


def _agreed_info(name: str, parts: Sequence[SavedBox]) -> TensorInfo:
    first = parts[0]
    for part in parts:
        found, expected = (part.tensor.dtype, part.global_shape), (first.tensor.dtype, first.global_shape)
        if found != expected:
            raise CheckpointError(f"{name!r} is {expected} on {first.rank} but {found} on {part.rank}")
    return TensorInfo(first.tensor.dtype, first.global_shape)


def _jsonable(objects: dict[str, Any]) -> dict[str, Any]:
    """Keep the objects that JSON can represent; others are left out with a warning."""
    kept = {}
    for key, value in objects.items():
        try:
            check_json(value, key)
        except ValueError as error:
            warnings.warn(f"leaving out {error}", stacklevel=3)
        else:
            if value is not None:
                kept[key] = value
    return kept
