"""The inputs and outputs of a program: shapes, dtypes and nesting. All of it is known before the first call."""

from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from reprlib import repr as shortened
from typing import Any, Self

import torch
from torch import Tensor

from nxd_trace.structure import Structure, check_structure, flatten, unflatten

_MOST_ELEMENTS = 1 << 48  # more than any machine has bytes


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor; the dtype by its name in torch, such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The spec of this tensor."""
        return cls(tuple(tensor.shape), dtype_name(tensor))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The spec out of a manifest.

        Raises:
            ValueError: it is no shape, or no dtype of torch.
        """
        shape, dtype = shape_from_json(value["shape"]), value["dtype"]
        if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"{shortened(dtype)} is no dtype of torch")
        return cls(shape, dtype)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
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
        name: of the program; "bucket_0", "bucket_1", ... for buckets.
        inputs: the tensors it takes, flat.
        input_structure: how they are nested in `[args, kwargs]`.
        outputs: the tensors it gives, flat, without those that aliases keep in the workers.
        output_structure: how they are nested in what a call returns.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    input_structure: Structure
    outputs: tuple[TensorSpec, ...]
    output_structure: Structure

    @property
    def keywords(self) -> tuple[str, ...]:
        """Names of the inputs that are given by keyword, in the order of the trace."""
        return tuple(self.input_structure["list"][1]["dict"])

    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, checked against what the program was traced with.

        Raises:
            TypeError: something else than tensors among them.
            ValueError: another nesting, shape or dtype.
        """
        tensors, structure = flatten([args, kwargs], "inputs")
        if structure != self.input_structure:
            raise ValueError(
                f"program {self.name!r} was traced with inputs nested as {describe(self.input_structure)}; "
                f"this call has {describe(structure)}"
            )
        for index, (tensor, spec) in enumerate(zip(tensors, self.inputs, strict=True)):
            if not spec.fits(tensor):
                raise ValueError(
                    f"input {index} of program {self.name!r} is {TensorSpec.of(tensor)}; it was traced with {spec}: "
                    "pad to that shape, or trace a bucket of this one"
                )
        return tensors

    def nested_outputs(self, tensors: list[Tensor]) -> Any:
        """The outputs of a call, nested as the model returned them."""
        return unflatten(self.output_structure, tensors)

    def to_json(self) -> dict[str, Any]:
        """As a manifest holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Out of a manifest.

        Raises:
            ValueError: it holds what `to_json` would not have given.
        """
        inputs = tuple(TensorSpec.from_json(spec) for spec in value["inputs"])
        outputs = tuple(TensorSpec.from_json(spec) for spec in value["outputs"])
        match value["input_structure"]:
            case {"list": [{"tuple": _}, {"dict": _}]}:
                check_structure(value["input_structure"], len(inputs))
            case other:
                raise ValueError(f"{shortened(other)} is no nesting of positional and keyword inputs")
        check_structure(value["output_structure"], len(outputs))
        if not isinstance(value["name"], str):
            raise ValueError(f"{shortened(value['name'])} is no name of a program")
        return cls(value["name"], inputs, value["input_structure"], outputs, value["output_structure"])


def shape_from_json(value: Any) -> tuple[int, ...]:
    """The shape out of a manifest.

    Raises:
        ValueError: it is none, or one that no machine has the memory for.
    """
    if (
        not isinstance(value, list)
        or not all(type(length) is int and length >= 0 for length in value)
        or prod(max(length, 1) for length in value) > _MOST_ELEMENTS
    ):
        raise ValueError(f"{shortened(value)} is no shape of a tensor")
    return tuple(value)


def dtype_name(tensor: Tensor) -> str:
    """Of its dtype, as an attribute of torch: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def describe(input_structure: Structure) -> str:
    """`[args, kwargs]` in words, without its tensors."""
    args, kwargs = input_structure["list"]
    names = list(kwargs["dict"])
    return (
        f"{len(args['tuple'])} positional arguments and the keywords {names}"
        if names
        else (f"{len(args['tuple'])} positional arguments")
    )
