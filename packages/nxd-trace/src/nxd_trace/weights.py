"""Sources of weights: logical tensors, from which each rank reads its own shards.

Logical names and shapes are those of the unsharded model, as in `nxd_state`'s shard metadata.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from nxd_state import Box, ShardPiece, ShardSpec, get_shard_spec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nxd_trace.errors import ModelFolderError
from nxd_trace.programs import TensorSpec, dtype_name, shape_from_json

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class LogicalTensor(Protocol):
    """Description of one tensor of a source."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""


class WeightSource(Protocol):
    """A picklable object that reads boxes of logical tensors, such as `nxd_ckpt.open_checkpoint(...)`."""

    @property
    def tensors(self) -> Mapping[str, LogicalTensor]:
        """The logical tensors, by name."""

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of this shape at `offsets`."""


# Everything that weights can be read from: a safetensors file or a folder of them, tensors by name, or a checkpoint.
Weights = str | Path | Mapping[str, Tensor] | WeightSource


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor in a safetensors file."""

    file: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]


class SafetensorsFiles:
    """Logical tensors in safetensors files, such as a Hugging Face model's folder. Keeps no file open.

    Raises:
        ModelFolderError: there is no file, or one is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path).absolute()
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ModelFolderError(f"{path} holds no weights; pass a .safetensors file or a folder of them")
        self.tensors: dict[str, SafetensorsEntry] = {}
        for file in files:
            self.tensors |= stored_tensors(file)

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of this shape at `offsets`."""
        with open_safetensors(Path(self.tensors[name].file)) as stored:
            if not shape:
                whole: Tensor = stored.get_tensor(name)
                return whole
            box: Tensor = stored.get_slice(name)[Box(tuple(offsets), tuple(shape)).slices]
            return box


def stored_tensors(file: Path) -> dict[str, SafetensorsEntry]:
    """Return the descriptions of a safetensors file's tensors, by name."""
    found = {}
    with open_safetensors(file) as stored:
        for name in stored.keys():  # noqa: SIM118 - it cannot be iterated
            part = stored.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise ModelFolderError(
                    f"{file} holds {name!r} of dtype {part.get_dtype()}; expected one of {', '.join(_DTYPES)}"
                )
            found[name] = SafetensorsEntry(str(file), _DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return found


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file for reading."""
    try:
        with safe_open(str(file), framework="pt") as stored:
            yield stored
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"{file} cannot be read: {error}. Copy it again from its source, or save the model again"
        ) from error


def save_safetensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file."""
    try:
        save_file(dict(tensors), file)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


@contextmanager
def as_source(weights: Weights) -> Iterator[WeightSource]:
    """Return a source that workers can read; tensors in memory are written to a temporary file."""
    if isinstance(weights, str | Path):
        yield SafetensorsFiles(weights)
    elif isinstance(weights, Mapping):
        with TemporaryDirectory(prefix="nxd_trace_weights_") as folder:
            file = Path(folder) / "weights.safetensors"
            save_safetensors({name: _checked_copy(name, tensor) for name, tensor in weights.items()}, file)
            yield SafetensorsFiles(file)
    elif hasattr(weights, "read_box") and hasattr(weights, "tensors"):
        yield weights
    else:
        raise TypeError(
            f"weights cannot be read from a {type(weights).__name__}; pass a safetensors file or folder, a dict of "
            "logical tensors, or an open checkpoint"
        )


def _checked_copy(name: str, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"weights[{name!r}] is a {type(tensor).__name__}; expected a tensor")
    if tensor.dtype not in _DTYPES.values():
        raise ValueError(
            f"weights[{name!r}] has dtype {dtype_name(tensor)}, which safetensors does not support; convert it"
        )
    return copy_for_file(tensor)


def copy_for_file(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU; safetensors refuses tensors that share memory."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Weight:
    """Describes one weight of one rank.

    Attributes:
        shape: shape on this rank.
        dtype: name of the dtype in torch.
        pieces: boxes of the logical tensors, with full names; None if the rank holds the whole tensor.
        required: whether a source must have it; False for buffers.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[ShardPiece, ...] | None
    required: bool

    def spec(self, name: str) -> ShardSpec:
        """Return the shard spec of this weight, given its name."""
        if self.pieces is None:
            return ShardSpec.whole(self.shape, name=name)
        return ShardSpec(self.shape, self.pieces)

    def is_filled_from(self, source: WeightSource, name: str) -> bool:
        """Whether the weight is read from the source: the source has it, or must have it."""
        return self.required or all(piece.name in source.tensors for piece in self.spec(name).pieces)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of a manifest."""
        pieces = self.pieces and [
            {
                "name": piece.name,
                "shape": piece.local.shape,
                "local": piece.local.offset,
                "logical": piece.logical.offset,
                "logical_shape": piece.logical_shape,
            }
            for piece in self.pieces
        ]
        return {"shape": self.shape, "dtype": self.dtype, "pieces": pieces, "required": self.required}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Weight:
        """Read the JSON of a manifest."""
        pieces = value["pieces"] and tuple(
            ShardPiece(
                Box(shape_from_json(piece["local"]), shape_from_json(piece["shape"])),
                Box(shape_from_json(piece["logical"]), shape_from_json(piece["shape"])),
                shape_from_json(piece["logical_shape"]),
                str(piece["name"]),
            )
            for piece in value["pieces"]
        )
        spec = TensorSpec.from_json(dict(value))
        return cls(spec.shape, spec.dtype, pieces, bool(value["required"]))


def weight_of(name: str, tensor: Tensor, required: bool) -> Weight:
    """Describe a parameter or buffer by its shard metadata."""
    spec = get_shard_spec(tensor)
    pieces = None if spec is None else _with_full_names(name, spec.pieces)
    return Weight(tuple(tensor.shape), dtype_name(tensor), pieces, required)


def _with_full_names(name: str, pieces: Sequence[ShardPiece]) -> tuple[ShardPiece, ...]:
    """Complete the names of a spec, which are relative to the parent of the parameter's module."""
    parent = name.split(".")[:-2]
    return tuple(
        replace(piece, name=".".join([*parent, piece.name]) if piece.name else name, copies=1) for piece in pieces
    )


def find_misfits(weights: Mapping[str, Weight], source: WeightSource) -> list[str]:
    """List the tensors that one rank needs and that are missing in the source or mismatched."""
    misfits = []
    for name, weight in weights.items():
        if not weight.is_filled_from(source, name):
            continue
        needed = getattr(torch, weight.dtype)
        for piece in weight.spec(name).pieces:
            stored = source.tensors.get(piece.name)
            if stored is None:
                misfits.append(f"{piece.name} is missing{_hint(piece.name, source)}")
                continue
            if tuple(stored.global_shape) != piece.logical_shape:
                misfits.append(
                    f"{piece.name} has shape {list(stored.global_shape)}, the model needs {list(piece.logical_shape)}"
                )
            if stored.dtype != needed and not (stored.dtype.is_floating_point and needed.is_floating_point):
                misfits.append(
                    f"{piece.name} has dtype {str(stored.dtype).removeprefix('torch.')}, the model needs {weight.dtype}"
                )
    return misfits


def _hint(name: str, source: WeightSource) -> str:
    """Return a hint if the source has the tensor below another key."""
    longer = next((it for it in source.tensors if it.endswith(f".{name}")), None)
    if longer is None:
        return ""
    return f", but {longer} exists: pass the part below it, for a checkpoint .part({longer.removesuffix(f'.{name}')!r})"


def tied_names(weights: Mapping[str, Tensor], known: Set[str]) -> set[str]:
    """Return the names of tensors that share memory with a tensor of a known name."""

    def place(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

    places = {place(tensor) for name, tensor in weights.items() if name in known}
    return {name for name, tensor in weights.items() if place(tensor) in places}


def check_fit(misfits: Sequence[str]) -> None:
    """Raise a ValueError that lists the misfits, if there are any."""
    if misfits:
        raise ValueError(
            "the weights do not fit the model:\n  "
            + "\n  ".join(dict.fromkeys(misfits))
            + "\nPass weights with the names, shapes and dtypes of the unsharded model"
        )


@torch.no_grad()
def read_weights(
    weights: Mapping[str, Weight], source: WeightSource, destination: Callable[[str], Tensor]
) -> list[str]:
    """Read this rank's shards of the source's tensors; padding becomes zero.

    Everything is checked before anything is written. Floating-point numbers are converted to the weight's dtype.

    Returns:
        Names of the filled weights; buffers that the source lacks are skipped.
    """
    check_fit(find_misfits(weights, source))
    filled = [name for name, weight in weights.items() if weight.is_filled_from(source, name)]
    for name in filled:
        tensor, spec = destination(name), weights[name].spec(name)
        if spec.has_padding:
            tensor.zero_()
        for piece in spec.pieces:
            tensor[piece.local.slices].copy_(source.read_box(piece.name, piece.logical.offset, piece.logical.shape))
    return filled
