"""Tensors made of boxes of other tensors, for tensors whose names or shapes differ between a folder and a model.

transformers holds some tensors differently in memory than in files: under another name, or fused, such as all experts
of a layer in one tensor. Here such a tensor is a list of `TensorPart`s, which work in both directions. Values are
views; nothing is copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

from nxd_ckpt import Shard, TensorInfo
from nxd_ckpt.boxes import Box
from nxd_ckpt.interop import TensorSource
from torch import Tensor


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor that equals a box of a source tensor, up to the order of dims and dims of length one.

    Attributes:
        box: box of the tensor.
        source: name of the source tensor.
        source_box: box of the source tensor; a dim that `order` omits has length one.
        order: the source's dim for each dim of `box`; None for a dim of length one that the source lacks.
    """

    box: Box
    source: str
    source_box: Box
    order: tuple[int | None, ...]

    def source_box_of(self, box: Box) -> Box:
        """The source's box for a box inside `self.box`."""
        offsets, shape = list(self.source_box.offsets), list(self.source_box.shape)
        for dim, source_dim in enumerate(self.order):
            if source_dim is not None:
                offsets[source_dim] += box.offsets[dim] - self.box.offsets[dim]
                shape[source_dim] = box.shape[dim]
        return Box(tuple(offsets), tuple(shape))

    def inverted(self, name: str) -> "TensorPart":
        """The same part seen from the source tensor, with the tensor `name` as its source."""
        places = {source_dim: dim for dim, source_dim in enumerate(self.order) if source_dim is not None}
        order = tuple(places.get(dim) for dim in range(len(self.source_box.shape)))
        return TensorPart(self.source_box, name, self.box, order)

    def view(self, values: Tensor) -> Tensor:
        """Rearrange values of a box of the source into a box of the tensor."""
        kept = [dim for dim in self.order if dim is not None]
        left_out = [dim for dim in range(values.dim()) if dim not in kept]
        values = values.permute(*kept, *left_out).flatten(len(kept)) if left_out else values.permute(kept)
        if left_out:
            values = values[..., 0]
        for dim, source_dim in enumerate(self.order):
            if source_dim is None:
                values = values.unsqueeze(dim)
        return values


@dataclass(frozen=True)
class Rearranged:
    """A tensor's shape and its parts."""

    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Self:
        """An unchanged tensor."""
        box = Box.whole(tuple(shape))
        return cls(box.shape, (TensorPart(box, name, box, tuple(range(len(box.shape)))),))

    def stacked_at(self, dim: int, index: int, count: int) -> "Rearranged":
        """Return this tensor as number `index` of `count` along a new dim."""
        parts = [
            replace(
                it,
                box=Box(_inserted(it.box.offsets, dim, index), _inserted(it.box.shape, dim, 1)),
                order=_inserted(it.order, dim, None),
            )
            for it in self.parts
        ]
        return Rearranged(_inserted(self.shape, dim, count), tuple(parts))

    def transposed(self, first: int, second: int) -> "Rearranged":
        """Swap two dims."""
        dims = list(range(len(self.shape)))
        dims[first], dims[second] = dims[second], dims[first]
        parts = [
            replace(
                it, box=Box(_picked(it.box.offsets, dims), _picked(it.box.shape, dims)), order=_picked(it.order, dims)
            )
            for it in self.parts
        ]
        return Rearranged(_picked(self.shape, dims), tuple(parts))

    def split(self, sizes: Sequence[int], dim: int) -> "list[Rearranged]":
        """Split along a dim."""
        starts = [0, *accumulate(sizes)]
        return [self._cut(dim, start, size) for start, size in zip(starts, sizes, strict=False)]

    def _cut(self, dim: int, start: int, size: int) -> "Rearranged":
        shape = _replaced(self.shape, dim, size)
        window = Box(_replaced((0,) * len(self.shape), dim, start), shape)
        parts = []
        for part in self.parts:
            common = part.box.intersect(window)
            if common is not None:
                parts.append(replace(part, box=common.relative_to(window), source_box=part.source_box_of(common)))
        return Rearranged(shape, tuple(parts))


def stack(tensors: Sequence[Rearranged], dim: int) -> Rearranged:
    """Stack tensors of one shape along a new dim."""
    placed = [tensor.stacked_at(dim, index, len(tensors)) for index, tensor in enumerate(tensors)]
    return Rearranged(placed[0].shape, tuple(part for tensor in placed for part in tensor.parts))


def concatenate(tensors: Sequence[Rearranged], dim: int) -> Rearranged:
    """Concatenate tensors along a dim."""
    parts, start = [], 0
    for tensor in tensors:
        for part in tensor.parts:
            offsets = _replaced(part.box.offsets, dim, part.box.offsets[dim] + start)
            parts.append(replace(part, box=Box(offsets, part.box.shape)))
        start += tensor.shape[dim]
    return Rearranged(_replaced(tensors[0].shape, dim, start), tuple(parts))


@dataclass(frozen=True)
class RearrangedSource:
    """Tensors made from those of a source, under other names; the source's own are hidden.

    Args:
        source: the source.
        rearranged: the rearrangement that makes each tensor, by name.
        objects: additional objects, see `TensorSource`.

    Raises:
        ValueError: the parts of a tensor differ in dtype.
    """

    source: TensorSource
    rearranged: Mapping[str, Rearranged]
    objects: Any = None

    def __post_init__(self) -> None:
        for name, tensor in self.rearranged.items():
            dtypes = {self.source.tensors[part.source].dtype for part in tensor.parts}
            if len(dtypes) != 1:
                found = ", ".join(sorted(map(str, dtypes)))
                raise ValueError(f"the parts of {name!r} have the dtypes {found}; convert them to one dtype")

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of every tensor."""
        return {
            name: TensorInfo(self.source.tensors[tensor.parts[0].source].dtype, tensor.shape)
            for name, tensor in self.rearranged.items()
        }

    @property
    def is_mapped(self) -> bool:
        """Whether the source's tensors are mapped files."""
        return self.source.is_mapped

    def sources_of(self, name: str, box: Box) -> list[tuple[str, Box]]:
        """Return the boxes of the source that `shards` reads for this box."""
        parts = ((part, part.box.intersect(box)) for part in self.rearranged[name].parts)
        return [(part.source, part.source_box_of(common)) for part, common in parts if common is not None]

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """Return views that hold all elements of the box."""
        found = []
        for part in self.rearranged[name].parts:
            common = part.box.intersect(box)
            if common is None:
                continue
            wanted, back = part.source_box_of(common), part.inverted(name)
            for shard in self.source.shards(part.source, wanted):
                inside = shard.box.intersect(wanted)
                if inside is not None:
                    values = part.view(shard.tensor[inside.relative_to(shard.box).slices])
                    found.append(Shard(values, back.source_box_of(inside).offsets))
        return found


def inverse(rearranged: Mapping[str, Rearranged], shapes: Mapping[str, Sequence[int]]) -> dict[str, Rearranged]:
    """Return the inverse rearrangements: how the sources are made from the tensors that were made from them."""
    parts: dict[str, list[TensorPart]] = {name: [] for name in shapes}
    for name, tensor in rearranged.items():
        for part in tensor.parts:
            parts[part.source].append(part.inverted(name))
    return {name: Rearranged(tuple(shapes[name]), tuple(found)) for name, found in parts.items() if found}


def _inserted(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index:])


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _picked(values: tuple[Any, ...], indices: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[index] for index in indices)


# Options of transformers' operations that make them depend on more than shapes.
_OPTIONS_NOT_KNOWN = ("check_dims", "num_shards_attribute")
_OPERATIONS = ("MergeModulelist", "Concatenate", "Chunk", "Split", "Transpose")


def is_rearrangement(operation: Any) -> bool:
    """Whether `rearrange` knows an operation of transformers' `core_model_loading`."""
    options = (getattr(operation, option, None) for option in _OPTIONS_NOT_KNOWN)
    return type(operation).__name__ in _OPERATIONS and not any(options)


def rearrange(
    operation: Any,
    sources: Sequence[str],
    targets: Mapping[str, tuple[int, ...]],
    values: Mapping[str, list[Rearranged]],
) -> dict[str, list[Rearranged]]:
    """Apply an operation of transformers' `core_model_loading`.

    Args:
        operation: one that `is_rearrangement`.
        sources: its rule's source patterns, in order.
        targets: the shape of the model's tensor for each of its rule's target patterns.
        values: the tensors of each pattern.
    """
    kind, first = type(operation).__name__, next(iter(targets))
    if kind == "MergeModulelist":
        stacked = {pattern: [stack(tensors, operation.dim)] for pattern, tensors in values.items()}
        return stacked if len(values) > 1 else {first: next(iter(stacked.values()))}
    if kind == "Concatenate":
        ordered = [tensor for pattern in sources for tensor in values.get(pattern, [])]
        return {first: [concatenate(ordered, operation.dim)]}
    ((key, (whole,)),) = values.items()
    if kind == "Transpose":
        return {first if len(targets) == 1 else key: [whole.transposed(operation.dim0, operation.dim1)]}
    equal = whole.shape[operation.dim] // len(targets)
    sizes = [equal if kind == "Chunk" else shape[operation.dim] for shape in targets.values()]
    return {pattern: [piece] for pattern, piece in zip(targets, whole.split(sizes, operation.dim), strict=True)}
