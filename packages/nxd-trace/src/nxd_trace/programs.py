"""Programs of a traced model, and their signatures: the shapes, dtypes and nesting of inputs and outputs.

Programs take and return flat lists of tensors; a JSON-serializable structure restores their nesting in tuples, lists
and dicts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from reprlib import repr as shortened
from typing import Any, Self

import torch
from torch import Tensor

# An index into the flat list, None, or {"tuple" | "list": [...]} or {"dict": {...}}.
Structure = Any


def flatten(value: Any, what: str) -> tuple[list[Tensor], Structure]:
    """Return the tensors in `value`, in order, and the structure of their nesting."""
    tensors: list[Tensor] = []

    def visit(part: Any, path: str) -> Structure:
        if isinstance(part, Tensor):
            tensors.append(part)
            return len(tensors) - 1
        if part is None:
            return None
        if isinstance(part, Mapping) and all(isinstance(key, str) for key in part):
            return {"dict": {key: visit(inner, f"{path}[{key!r}]") for key, inner in part.items()}}
        if isinstance(part, Sequence) and not isinstance(part, str | bytes):
            kind = "list" if isinstance(part, list) else "tuple"
            return {kind: [visit(inner, f"{path}[{index}]") for index, inner in enumerate(part)]}
        raise TypeError(
            f"{path} is a {type(part).__name__}; expected tensors, None, or tuples, lists and dicts of them: "
            "other values are part of the program, so pass them to func"
        )

    return tensors, visit(value, what)


def unflatten(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """Nest tensors: the inverse of `flatten`."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return tensors[structure]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: unflatten(part, tensors) for key, part in parts.items()}
    inner = [unflatten(part, tensors) for part in parts]
    return inner if kind == "list" else tuple(inner)


def check_structure(structure: Structure, count: int) -> None:
    """Raise ValueError unless `flatten` could have returned this structure with this number of tensors."""
    stack, found = [structure], 0
    while stack:
        match stack.pop():
            case None:
                pass
            case int(index) if index == found:
                found += 1
            case {"tuple": list(parts)} as nested if len(nested) == 1:
                stack.extend(reversed(parts))
            case {"list": list(parts)} as nested if len(nested) == 1:
                stack.extend(reversed(parts))
            case {"dict": dict(named)} as nested if len(nested) == 1:
                stack.extend(reversed(named.values()))
            case other:
                raise ValueError(f"{shortened(other)} is not a nesting of tensors; expected the next index, {found}")
    if found != count:
        raise ValueError(f"{shortened(structure)} nests {found} tensors, but there are {count}")


def without(structure: Structure, dropped: set[int]) -> Structure:
    """Return the structure without the tensors at these indices, and without containers that held only these."""
    remaining = [index for index in range(len(_indices(structure))) if index not in dropped]
    kept = {old: new for new, old in enumerate(remaining)}

    def visit(part: Structure) -> Structure:
        if part is None or isinstance(part, int):
            return None if part is None else kept[part]
        ((kind, parts),) = part.items()
        if kind == "dict":
            return {kind: {key: visit(inner) for key, inner in parts.items() if not _only(inner, dropped)}}
        return {kind: [visit(inner) for inner in parts if not _only(inner, dropped)]}

    return visit(structure)


def _indices(structure: Structure) -> list[int]:
    if structure is None:
        return []
    if isinstance(structure, int):
        return [structure]
    ((kind, parts),) = structure.items()
    return [index for part in (parts.values() if kind == "dict" else parts) for index in _indices(part)]


def _only(structure: Structure, dropped: set[int]) -> bool:
    indices = _indices(structure)
    return bool(indices) and dropped.issuperset(indices)


_MOST_ELEMENTS = 1 << 48  # more bytes than any machine has


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor; the dtype is its name in torch, such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), dtype_name(tensor))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read a spec from a manifest."""
        shape, dtype = shape_from_json(value["shape"]), value["dtype"]
        if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"{shortened(dtype)} is not a torch dtype")
        return cls(shape, dtype)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as an object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.torch_dtype.itemsize

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor has this shape and dtype."""
        return tensor.shape == self.shape and tensor.dtype == self.torch_dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of one program, the same on every rank.

    Attributes:
        name: name of the program; "bucket_0", "bucket_1", ... for buckets.
        inputs: specs of the input tensors.
        input_structure: nesting of the inputs in `[args, kwargs]`.
        outputs: specs of the output tensors, without those that are new state.
        output_structure: nesting of the outputs.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    input_structure: Structure
    outputs: tuple[TensorSpec, ...]
    output_structure: Structure

    @property
    def keywords(self) -> tuple[str, ...]:
        """Names of the keyword inputs, in the order of the trace."""
        return tuple(self.input_structure["list"][1]["dict"])

    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Flatten the inputs of a call, and check that they match those of the trace.

        Raises:
            TypeError: the inputs contain something other than tensors.
            ValueError: the nesting, a shape or a dtype differs.
        """
        tensors, structure = flatten([args, kwargs], "inputs")
        if structure != self.input_structure:
            raise ValueError(
                f"program {self.name!r} was traced with inputs nested as {_describe(self.input_structure)}; "
                f"this call has {_describe(structure)}"
            )
        for index, (tensor, spec) in enumerate(zip(tensors, self.inputs, strict=True)):
            if not spec.fits(tensor):
                raise ValueError(
                    f"input {index} of program {self.name!r} is {TensorSpec.of(tensor)}; it was traced with {spec}; "
                    "pad to that shape, or trace a bucket of this one"
                )
        return tensors

    def nested_outputs(self, tensors: list[Tensor]) -> Any:
        """Nest the outputs of a call as the model does."""
        return unflatten(self.output_structure, tensors)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read the JSON of a manifest."""
        inputs = tuple(TensorSpec.from_json(spec) for spec in value["inputs"])
        outputs = tuple(TensorSpec.from_json(spec) for spec in value["outputs"])
        match value["input_structure"]:
            case {"list": [{"tuple": _}, {"dict": _}]}:
                check_structure(value["input_structure"], len(inputs))
            case other:
                raise ValueError(f"{shortened(other)} is not a nesting of positional and keyword inputs")
        check_structure(value["output_structure"], len(outputs))
        if not isinstance(value["name"], str):
            raise ValueError(f"{shortened(value['name'])} is not a program name")
        return cls(value["name"], inputs, value["input_structure"], outputs, value["output_structure"])


def shape_from_json(value: Any) -> tuple[int, ...]:
    """Read a shape from a manifest."""
    if (
        not isinstance(value, list)
        or not all(type(length) is int and length >= 0 for length in value)
        or prod(max(length, 1) for length in value) > _MOST_ELEMENTS
    ):
        raise ValueError(f"{shortened(value)} is not a tensor shape")
    return tuple(value)


def dtype_name(tensor: Tensor) -> str:
    """The name of a tensor's dtype as an attribute of torch, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def _describe(input_structure: Structure) -> str:
    args, kwargs = input_structure["list"]
    keywords = f" and the keywords {list(kwargs['dict'])}" if kwargs["dict"] else ""
    return f"{len(args['tuple'])} positional arguments{keywords}"


@dataclass(frozen=True)
class Program:
    """A program to record, such as the prefill of one length or a decode step: a call of the model with these inputs.

    Programs of one trace share weights and state. Those with equal `func_kwargs` are recorded from one model.

    Attributes:
        name: name of the program, for calls.
        inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs; inputs may be nested tuples, lists
            and dicts of tensors. Only shapes and dtypes matter.
        func_kwargs: arguments of the function that returns the model.
    """

    name: str
    inputs: Any
    func_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        flatten([*self.call], f"the inputs of program {self.name!r}")

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the call to record."""
        if isinstance(self.inputs, Mapping):
            return (), dict(self.inputs)
        if isinstance(self.inputs, tuple | list):
            return tuple(self.inputs), {}
        if isinstance(self.inputs, Tensor):
            return (self.inputs,), {}
        raise TypeError(
            f"example inputs of program {self.name!r} are a {type(self.inputs).__name__}; expected a tensor, a tuple "
            "of tensors, or a dict of keyword inputs"
        )
