"""Detects the format of a checkpoint and opens it."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.files import has_file, is_remote, local_copy
from nxd_ckpt.interop import (
    from_checkpoint,
    open_deepspeed,
    open_fsdp,
    open_hugging_face,
    open_neuronx,
    open_torch_dcp,
)
from nxd_ckpt.interop.deepspeed import is_deepspeed
from nxd_ckpt.interop.fsdp import is_fsdp
from nxd_ckpt.interop.huggingface.reading import holds_model, other_kind
from nxd_ckpt.interop.neuronx import LLAMA, Sharding, Split, complete_tags
from nxd_ckpt.interop.source import TensorSource
from nxd_ckpt.reader import Checkpoint, TensorInfo, open_checkpoint
from nxd_ckpt.tensor_bytes import blocks_of, row_major_strides

SourceKind = Literal["nxd", "hf", "dcp", "fsdp", "deepspeed", "neuronx"]
SOURCE_KINDS: tuple[SourceKind, ...] = get_args(SourceKind)

CHECKPOINTS_OF_RUN = "checkpoints"  # in the output folder of `nxd train`


@dataclass(frozen=True)
class Opened:
    """A checkpoint of any format: `checkpoint` is set for nxd, `path` (on this machine) for the others."""

    kind: SourceKind
    source: TensorSource
    checkpoint: Checkpoint | None = None
    path: str = ""

    @property
    def reads_parts(self) -> bool:
        """Whether reading part of a tensor reads no more than that part."""
        return self.checkpoint is not None or self.source.is_mapped


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is, and the options needed to read it.

    Args:
        path: a folder, a file, or a URL.
        tag: name of the checkpoint in the folder; default: the newest, or the only one.
        kind: its format; default: detected.
        sharding: how tensors are split over ranks, for NeuronX.
        parameter_names: parameter names in the optimizer's order, for NeuronX.
        trust_user_content: whether its pickles may run code, for NeuronX.
    """

    path: str
    tag: str | None = None
    kind: SourceKind | None = None
    sharding: Mapping[str, Sharding] | None = None
    parameter_names: Sequence[str] | Mapping[int, Sequence[str]] | None = None
    trust_user_content: bool = False


@contextmanager
def opened(place: Place) -> Iterator[Opened]:
    """Open a checkpoint of any format. A foreign checkpoint at a URL is first copied to this machine.

    Raises:
        ValueError: an option that this format needs is missing.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    kind = place.kind or _detect(place.path, place.tag)
    if kind == "nxd":
        checkpoint = open_checkpoint(*root_and_tag(place.path, place.tag))
        yield Opened(kind, from_checkpoint(checkpoint), checkpoint)
        return
    with local_copy(place.path) as path:
        folder = os.path.join(path, place.tag) if place.tag else path
        yield Opened(kind, _open_foreign(kind, path, place), path=folder)


def boxes_to_read(info: TensorInfo, *, whole: bool) -> Iterable[Box]:
    """Return boxes that cover a tensor, of 16 MiB each unless it has to be read whole."""
    shape = info.global_shape
    return [Box.whole(shape)] if whole else blocks_of(shape, row_major_strides(shape), info.dtype.itemsize)


def checkpoints_of(path: str) -> str:
    """Return the folder of checkpoints if this is the output folder of a run, otherwise the path itself."""
    inside = os.path.join(path, CHECKPOINTS_OF_RUN)
    if is_remote(path) or not os.path.isdir(inside):
        return path
    try:
        _detect(path, None)
    except (CheckpointError, OSError):
        return inside
    return path


def root_and_tag(path: str, tag: str | None) -> tuple[str, str | None]:
    """Return the arguments of `open_checkpoint`, also for the path of a checkpoint's own folder."""
    if tag is None and os.path.isfile(os.path.join(path, "manifest.json")):
        root, found = os.path.split(os.path.abspath(path))
        return root, found
    return path, tag


def read_sharding(text: str) -> Mapping[str, Sharding]:
    """Return the sharding given by `--sharding`: "llama", or a JSON file {pattern: {"dim": 0, "stride": 1, ...}}.

    Raises:
        ValueError: the file does not have that form.
    """
    if text == "llama":
        return LLAMA
    content = read_json(text)
    try:
        return {pattern: Split(**entry) for pattern, entry in content.items()}
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f'{text}: {error}; expected {{pattern: {{"dim": 0, "stride": 1}}}}') from error


def read_stages(path: str) -> Mapping[str, int]:
    """Read the JSON file given by `--stages`: {name pattern: pipeline rank}.

    Raises:
        ValueError: the file does not have that form.
    """
    content = read_json(path)
    if isinstance(content, dict) and all(type(stage) is int and stage >= 0 for stage in content.values()):
        return content
    raise ValueError(f'{path} must have the form {{"pattern": 0}}, with a pipeline rank for each pattern')


def read_parameter_names(path: str) -> Sequence[str] | Mapping[int, Sequence[str]]:
    """Read the JSON file given by `--parameter-names`: a list of names, or {pipeline rank: list of names}.

    Raises:
        ValueError: the file does not have that form.
    """
    content = read_json(path)
    if _is_list_of_names(content):
        return content
    if isinstance(content, dict) and all(map(str.isdecimal, content)) and all(map(_is_list_of_names, content.values())):
        return {int(rank): names for rank, names in content.items()}
    raise ValueError(f'{path} must be a list of names or have the form {{"0": ["name"]}}')


def read_json(path: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: the file is not valid JSON.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error


def _detect(path: str, tag: str | None) -> SourceKind:
    if is_remote(path):
        return "nxd"
    if not os.path.exists(path):
        raise CheckpointError(f"{path} does not exist")
    folder = os.path.join(path, tag) if tag else path
    if os.path.isfile(path):
        return "hf"
    known: dict[SourceKind, Callable[[str], bool]] = {
        "hf": holds_model,
        "dcp": lambda it: has_file(it, ".metadata"),
        "fsdp": is_fsdp,
        "deepspeed": is_deepspeed,
    }
    if kind := next((kind for kind, is_kind in known.items() if is_kind(folder)), None):
        return kind
    names = os.listdir(path) if os.path.isdir(path) else []
    if has_file(folder, "manifest.json") or any(has_file(os.path.join(path, name), "manifest.json") for name in names):
        return "nxd"
    if (
        has_file(folder, "checkpoint")
        or has_file(folder, "done")
        or complete_tags(path)
        or any(name.startswith("tp_rank_") for name in names)
    ):
        return "neuronx"
    if found := other_kind(folder):
        raise CheckpointError(f"{folder} does not contain a checkpoint in a known format, but {found}")
    if not names:
        raise CheckpointError(f"{path} does not contain a checkpoint; it is empty")
    raise CheckpointError(
        f"{path} does not contain a checkpoint in a known format ({', '.join(SOURCE_KINDS)}); pass its folder"
    )


def _open_foreign(kind: SourceKind, path: str, place: Place) -> TensorSource:
    if kind == "neuronx":
        if place.sharding is None:
            raise ValueError(f"{place.path} is a sharded NeuronX checkpoint; pass --sharding llama or a JSON file")
        return open_neuronx(
            path,
            place.tag,
            sharding=place.sharding,
            parameter_names=place.parameter_names,
            trust_user_content=place.trust_user_content,
        )
    folder = os.path.join(path, place.tag) if place.tag else path
    openers = {"hf": open_hugging_face, "fsdp": open_fsdp, "deepspeed": open_deepspeed}
    return openers[kind](folder) if kind in openers else open_torch_dcp(folder)


def _is_list_of_names(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(name, str) for name in content)
