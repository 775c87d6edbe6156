"""`Program`: one operation of a traced model, such as the prefill of one length or one decoding step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nxd_trace.structure import flatten


@dataclass(frozen=True)
class Program:
    """A program to record: a call, with these inputs, of the model that `func(**func_kwargs)` returns.

    Programs of one trace share weights and state. Those with equal `func_kwargs` are recorded from one model.

    Attributes:
        name: the name it is called by.
        inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs; the inputs may be nested tuples,
            lists and dicts of tensors. Their shapes and dtypes are fixed, their values do not matter.
        func_kwargs: arguments for `func`.
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
