"""Finding out which kind of checkpoint a path is, and opening it."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nxd_ckpt.boxes import Box
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.interop import from_checkpoint, open_hugging_face, open_neuronx, open_torch_dcp
from nxd_ckpt.interop.huggingface.reading import holds_model, other_kind
from nxd_ckpt.interop.neuronx import LLAMA, Sharding, Split, complete_tags
from nxd_ckpt.interop.remote import is_remote, local_copy
from nxd_ckpt.interop.source import TensorSource
from nxd_ckpt.reader import Checkpoint, TensorInfo, open_checkpoint
from nxd_ckpt.tensor_bytes import blocks_of, row_major_strides

SourceKind = Literal["nxd", "hf", "dcp", "neuronx"]
SOURCE_KINDS: tuple[SourceKind, ...] = get_args(SourceKind)


@dataclass(frozen=True)
class Opened:
    """A checkpoint of any kind; `checkpoint` if it is one of ours, else `path` on this machine."""

    kind: SourceKind
    source: TensorSource
    checkpoint: Checkpoint | None = None
    path: str = ""

    @property
    def reads_parts(self) -> bool:
        """Whether a part of a tensor costs no more than that part."""
        return self.checkpoint is not None or self.source.is_mapped


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies, and what must be known to read it.

    Args:
        path: a folder, a file, or a URL.
        tag: which checkpoint of the folder; default: the newest, or the only one.
        kind: its format; default: found out.
        sharding: how ranks' tensors fit together, for NeuronX.
        parameter_names: order of the optimizer's parameters, for NeuronX.
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
    """Opens a checkpoint of any kind. Those of others that lie behind a URL are copied to this machine first.

    Raises:
        ValueError: something is missing that this kind needs.
        CheckpointError: there is none, or it is damaged.
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
    """All of a tensor, in parts of 16 MiB unless it has to be read whole."""
    shape = info.global_shape
    return [Box.whole(shape)] if whole else blocks_of(shape, row_major_strides(shape), info.dtype.itemsize)


def root_and_tag(path: str, tag: str | None) -> tuple[str, str | None]:
    """What `open_checkpoint` takes, also for a path that is a checkpoint's own folder."""
    if tag is None and os.path.isfile(os.path.join(path, "manifest.json")):
        root, found = os.path.split(os.path.abspath(path))
        return root, found
    return path, tag


def read_sharding(text: str) -> Mapping[str, Sharding]:
    """The sharding that `--sharding` names: "llama", or a JSON file {pattern: {"dim": 0, "stride": 1, ...}}.

    Raises:
        ValueError: the file is not of that form.
    """
    if text == "llama":
        return LLAMA
    content = read_json(text)
    try:
        return {pattern: Split(**entry) for pattern, entry in content.items()}
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f'{text}: {error}; expected {{pattern: {{"dim": 0, "stride": 1}}}}') from error


def read_stages(path: str) -> Mapping[str, int]:
    """What `--stages` names: a JSON file {pattern of names: pipeline rank}.

    Raises:
        ValueError: the file is not of that form.
    """
    content = read_json(path)
    if isinstance(content, dict) and all(type(stage) is int and stage >= 0 for stage in content.values()):
        return content
    raise ValueError(f'{path} is not of the form {{"pattern": 0}}, with a pipeline rank for each pattern')


def read_parameter_names(path: str) -> Sequence[str] | Mapping[int, Sequence[str]]:
    """What `--parameter-names` names: a JSON list of names, or {pipeline rank: list of names}.

    Raises:
        ValueError: the file is not of that form.
    """
    content = read_json(path)
    if _is_list_of_names(content):
        return content
    if isinstance(content, dict) and all(map(str.isdecimal, content)) and all(map(_is_list_of_names, content.values())):
        return {int(rank): names for rank, names in content.items()}
    raise ValueError(f'{path} is neither a list of names nor of the form {{"0": ["name"]}}')


def read_json(path: str) -> Any:
    """A JSON file's content.

    Raises:
        ValueError: it is no JSON.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error


def _detect(path: str, tag: str | None) -> SourceKind:
    if is_remote(path):
        return "nxd"
    if not os.path.exists(path):
        raise CheckpointError(f"{path} does not exist")
    folder = os.path.join(path, tag) if tag else path
    if os.path.isfile(path) or holds_model(folder):
        return "hf"
    if _has(folder, ".metadata"):
        return "dcp"
    names = os.listdir(path) if os.path.isdir(path) else []
    if _has(folder, "manifest.json") or any(_has(os.path.join(path, name), "manifest.json") for name in names):
        return "nxd"
    if (
        _has(folder, "checkpoint")
        or _has(folder, "done")
        or complete_tags(path)
        or any(name.startswith("tp_rank_") for name in names)
    ):
        return "neuronx"
    if found := other_kind(folder):
        raise CheckpointError(f"{folder} holds no checkpoint of a known kind, but {found}")
    if not names:
        raise CheckpointError(f"{path} holds no checkpoint; it is empty")
    raise CheckpointError(
        f"{path} holds no checkpoint of a known kind ({', '.join(SOURCE_KINDS)}); give the folder of one"
    )


def _open_foreign(kind: SourceKind, path: str, place: Place) -> TensorSource:
    if kind == "neuronx":
        if place.sharding is None:
            raise ValueError(f"{place.path} holds ranks' files of NeuronX; give --sharding llama, or a JSON file")
        return open_neuronx(
            path,
            place.tag,
            sharding=place.sharding,
            parameter_names=place.parameter_names,
            trust_user_content=place.trust_user_content,
        )
    folder = os.path.join(path, place.tag) if place.tag else path
    return open_hugging_face(folder) if kind == "hf" else open_torch_dcp(folder)


def _is_list_of_names(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(name, str) for name in content)


def _has(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, name))
