"""The files that each rank writes: their names in both layouts and older spellings, and the xser variant.

In xser, `<path>` is a skeleton with references instead of tensors, `<path>.tensors/tensor_<i>.pt` are the tensors, and
`<path>.info.pt` has their dtypes and shapes (v2 only, and missing in old checkpoints).
"""

import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import IO, Any

import torch

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop.safe_pickle import load_torch_file
from nxd_ckpt.objects import MAX_NESTING

BEGUN_MARKER = "checkpoint"
DONE_MARKER = "done"
USER_CONTENT = "user_content.pt"
V1_CONTENT = "checkpoint.pt"
TENSORS_SUFFIX = ".tensors"
INFO_SUFFIX = ".info.pt"
_V2_FILE = re.compile(r"dp_rank_(?P<dp>\d+)(?:_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")
_V1_ENTRY = re.compile(r"tp_rank_(?P<tp>\d+)(?:_pp_rank_(?P<pp>\d+))?(?:_dp_rank_(?P<dp>\d+))?")


@dataclass(frozen=True, order=True)
class Rank:
    """A position in the mesh of a NeuronX Distributed run."""

    pp: int
    ep: int
    tp: int
    dp: int

    def __str__(self) -> str:
        return f"pp rank {self.pp}, ep rank {self.ep}, tp rank {self.tp}, dp rank {self.dp}"


def v2_files(folder: str) -> dict[Rank, str]:
    """Return the rank files in `<tag>/model` or `<tag>/optim`; empty if there is no such folder.

    Raises:
        CheckpointError: a rank's file is missing.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return _complete(folder, ((_V2_FILE.fullmatch(name), os.path.join(folder, name)) for name in names))


def v1_files(folder: str) -> dict[Rank, str]:
    """Return the rank files below the folder passed to `parallel_layers.save`, plain or xser; empty if there are none.

    Raises:
        CheckpointError: a rank's file is missing.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = []
    for name in names:
        path = os.path.join(folder, name)
        match = _V1_ENTRY.fullmatch(name)
        found.append((match, os.path.join(path, V1_CONTENT) if os.path.isdir(path) else path))
    return _complete(folder, found)


def v2_name(rank: Rank, *, has_experts: bool = False) -> str:
    """Return the name of a rank's file in the v2 layout."""
    expert = f"_ep_rank_{rank.ep:02d}" if has_experts else ""
    return f"dp_rank_{rank.dp:02d}{expert}_tp_rank_{rank.tp:02d}_pp_rank_{rank.pp:02d}.pt"


def v1_name(rank: Rank) -> str:
    """Return the name of a rank's folder (plain) or skeleton file (xser) in the v1 layout."""
    return f"tp_rank_{rank.tp:02d}_pp_rank_{rank.pp:02d}"


def _complete(folder: str, entries: Iterable[tuple[re.Match[str] | None, str]]) -> dict[Rank, str]:
    files: dict[Rank, str] = {}
    for match, path in entries:
        if match is not None:
            numbers = {axis: int(number or 0) for axis, number in match.groupdict(default="0").items()}
            rank = Rank(numbers["pp"], numbers.get("ep", 0), numbers["tp"], numbers["dp"])
            if rank in files:
                raise CheckpointError(f"{folder} holds two files for {rank}: {files[rank]} and {path}")
            files[rank] = path
    missing = list(islice(_missing(files), 4))
    if missing:
        raise CheckpointError(f"{folder} is incomplete: there is no file of {'; '.join(map(str, missing))}")
    return dict(sorted(files.items()))


def _missing(files: Mapping[Rank, str]) -> Iterator[Rank]:
    """Yield the ranks missing from the smallest mesh that has all of these; lazily, as names can have any number."""
    size = {axis: 1 + max((getattr(rank, axis) for rank in files), default=-1) for axis in ("pp", "ep", "tp", "dp")}
    for pp in range(size["pp"]):
        for ep in range(size["ep"]):
            for tp in range(size["tp"]):
                for dp in range(size["dp"]):
                    if Rank(pp, ep, tp, dp) not in files:
                        yield Rank(pp, ep, tp, dp)


_MODULE = "torch_xla.utils.serialization"
_CLASS = "TensorReference"
_EXPERT_RANK = re.compile(r"ep_rank_\d+")
_PythonPickler: Any = pickle._Pickler  # the pure Python pickler, which allows renaming globals


class TensorReference:
    """A reference to a tensor by number. Pickled and read under the name of torch-xla's class, without torch-xla."""

    __slots__ = ("tid",)

    def __init__(self, tid: int) -> None:
        self.tid = tid

    def __setstate__(self, state: Any) -> None:
        self.tid = state[1]["tid"] if isinstance(state, tuple) else state["tid"]


def load_rank_file(path: str) -> Any:
    """Load a rank's file, xser or not: nested containers of tensors (views of mapped files) and plain values.

    Raises:
        CheckpointError: a file is missing, damaged or asks for something that is not allowed.
    """
    content = load_torch_file(path, extra=[(TensorReference, f"{_MODULE}.{_CLASS}")])
    info = load_torch_file(path + INFO_SUFFIX) if os.path.isfile(path + INFO_SUFFIX) else None
    if not isinstance(info, dict | None):
        raise CheckpointError(f"{path + INFO_SUFFIX} holds a {type(info).__name__}, expected a dict")

    def load_tensor(reference: TensorReference) -> torch.Tensor:
        number = getattr(reference, "tid", None)
        if type(number) is not int or number < 0:
            raise CheckpointError(f"{path} refers to a tensor {number!r}, expected a number")
        file = _tensor_file(path, number, info or {})
        tensor = load_torch_file(file)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{file} holds a {type(tensor).__name__}, expected a tensor")
        found = {"dtype": tensor.dtype, "shape": tensor.shape}
        said = info.get(number, found) if info is not None else found
        if not isinstance(said, dict) or any(said.get(key) != value for key, value in found.items()):
            raise CheckpointError(f"{file} holds {found}, but {path + INFO_SUFFIX} says {said}")
        return tensor

    try:
        return _replace(content, TensorReference, load_tensor)
    except _NestedTooDeepError as error:
        raise CheckpointError(f"{path} holds containers that are nested more than {MAX_NESTING} deep") from error


def _tensor_file(path: str, number: int, info: dict[Any, Any]) -> str:
    """Return the file of a rank's tensor. Tensors equal on all expert-parallel ranks are written only by the first one.

    Args:
        path: the path of the rank's skeleton.
        number: the tensor's number.
        info: descriptions of the rank's tensors by number, including whether each belongs to an expert; tensors of
            experts are stored with each rank.
    """
    folder, name = os.path.split(path)
    file = os.path.join(path + TENSORS_SUFFIX, f"tensor_{number}.pt")
    said = info.get(number)
    if not isinstance(said, dict) or said.get("expert_model_parallel") is not False:
        return file
    of_first = os.path.join(folder, _EXPERT_RANK.sub("ep_rank_00", name) + TENSORS_SUFFIX, f"tensor_{number}.pt")
    return of_first if not os.path.lexists(file) and os.path.lexists(of_first) else file


def save_skeleton(content: Any, stream: IO[bytes]) -> dict[int, torch.Tensor]:
    """Write the skeleton of nested containers, and return the tensors that it refers to, for the caller to write."""
    tensors: dict[int, torch.Tensor] = {}

    def refer(tensor: torch.Tensor) -> TensorReference:
        tensors[len(tensors)] = tensor
        return TensorReference(len(tensors) - 1)

    skeleton = _replace(content, torch.Tensor, refer)
    torch.save(skeleton, stream, pickle_module=_pickle_module())
    return tensors


class _SkeletonPickler(_PythonPickler):
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is TensorReference:
            self.write(pickle.GLOBAL + f"{_MODULE}\n{_CLASS}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def _pickle_module() -> Any:
    """Return a module that `torch.save` can use in place of `pickle`."""
    module: Any = ModuleType("pickle_of_skeletons")
    module.Pickler = _SkeletonPickler
    return module


class _NestedTooDeepError(Exception):
    """Containers are nested too deep, or contain themselves."""


def _replace(content: Any, kind: type, replace: Any, *, nesting: int = 0) -> Any:
    if nesting > MAX_NESTING:
        raise _NestedTooDeepError
    if isinstance(content, kind):
        return replace(content)
    if isinstance(content, dict):
        return {key: _replace(value, kind, replace, nesting=nesting + 1) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(_replace(value, kind, replace, nesting=nesting + 1) for value in content)
    return content
