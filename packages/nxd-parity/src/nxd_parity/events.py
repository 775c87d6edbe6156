"""What a recording holds: the tensors and the collectives of each rank, in the order in which they happened.

A line of JSON each; the values of tensors are in files of safetensors beside them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

INPUT = "input"
ACTIVATION = "activation"
LOSS = "loss"
ACTIVATION_GRADIENT = "activation gradient"
GRADIENT = "gradient"
GRADIENT_NORM = "gradient norm"
PARAMETER = "parameter"
OPTIMIZER_STATE = "optimizer state"
KINDS = (INPUT, ACTIVATION, LOSS, ACTIVATION_GRADIENT, GRADIENT, GRADIENT_NORM, PARAMETER, OPTIMIZER_STATE)


Runs = tuple[tuple[int, int], ...]  # positions along a dim, in order: the first of each run, and how many it has


@dataclass(frozen=True)
class Placement:
    """Which part of a whole tensor a rank's tensor is.

    Attributes:
        shape: shape of the whole tensor.
        start: where the part begins in it. It is a box of the sizes of the rank's tensor, unless `runs` says otherwise.
        summed_over: the global ranks whose tensors add up to the part, this one included; empty if nothing is to be
            added up.
        runs: of a part that is no box, the positions along each dim.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    summed_over: tuple[int, ...] = ()
    runs: tuple[Runs, ...] = ()


@dataclass(frozen=True)
class TensorEvent:
    """A tensor of a rank.

    Attributes:
        step: the optimizer step that it belongs to, from 1; parameters of step 0 are the initial ones.
        kind: one of `KINDS`.
        name: the module or parameter, without the prefixes of wrappers; a state is `parameter/exp_avg`.
        call: which call of the module in its step, from 0.
        output: which tensor among the module's outputs, from 0.
        model_call: which call of the whole model in its step, from 0.
        model: which of the models that the rank calls it belongs to, from 0, as a pipeline's rank has several stages.
        order: counts what the rank does; a module's inputs come before what happens inside it.
        largest: the largest absolute value.
        shape: shape of the rank's tensor.
        dtype: such as `torch.float32`.
        digest: of the bytes; equal digests are equal tensors.
        file: number of the file that has the values.
        key: name of the tensor in the file.
        placement: its place in the whole tensor if the program says it (DTensor); None if it is to be inferred.
        inputs: of an activation, the modules whose outputs were given to the module as they are.
    """

    step: int
    kind: str
    name: str
    call: int
    output: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: str
    file: int
    key: str
    largest: float
    model_call: int = 0
    model: int = 0
    order: int = 0
    placement: Placement | None = None
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class CollectiveEvent:
    """A collective or a message between ranks.

    Attributes:
        step: the optimizer step that it belongs to, from 1.
        operation: such as "all_reduce".
        ranks: the global ranks of the group; of a message, the two ranks.
        shape: shape of the tensor.
        dtype: such as "float32".
        reduction: such as "SUM"; empty where nothing is reduced.
        group: the name of the process group, the same on its ranks.
        module: the innermost module that runs; in backward the one whose output got its gradient last.
        phase: "forward" inside a module, "backward", or empty outside both.
    """

    step: int
    operation: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...] = ()
    dtype: str = ""
    reduction: str = ""
    group: str = ""
    module: str = ""
    phase: str = ""

    @property
    def place(self) -> str:
        """Where it is called, in words."""
        name = self.module or "the whole model"
        return {"forward": f"in {name}", "backward": f"in backward of {name}"}.get(self.phase, "outside the model")

    def __str__(self) -> str:
        reduction = f" {self.reduction}" if self.reduction else ""
        what = f" of {self.dtype} {list(self.shape)}" if self.dtype else ""
        return f"{self.operation}{reduction}{what} over ranks {', '.join(map(str, self.ranks))} {self.place}"


Event = TensorEvent | CollectiveEvent


def to_line(event: Event) -> str:
    """Return the line of JSON of an event."""
    fields: dict[str, Any] = {name: value for name, value in vars(event).items() if value not in ((), "", None)}
    if isinstance(event, TensorEvent):
        fields["shape"], fields["dtype"] = event.shape, _name_of(event.dtype)
        if event.placement is not None:
            fields["placement"] = vars(event.placement)
    return json.dumps(fields)


def from_line(line: str) -> Event:
    """Return the event of a line.

    Raises:
        ValueError: the line is not one that `to_line` writes.
    """
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise TypeError(f"a {type(fields).__name__}")
        return _collective(fields) if "operation" in fields else _tensor(fields)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{line[:80]!r} is not a line of a recording: {error!r}") from error


def _tensor(fields: Mapping[str, Any]) -> TensorEvent:
    if fields["kind"] not in KINDS:
        raise ValueError(f"kind {fields['kind']!r}")
    place = fields.get("placement")
    return TensorEvent(
        step=_count(fields["step"]),
        kind=fields["kind"],
        name=_text(fields.get("name", "")),
        call=_count(fields["call"]),
        output=_count(fields["output"]),
        shape=_counts(fields["shape"]),
        dtype=_dtype(fields["dtype"]),
        digest=_text(fields["digest"]),
        file=_count(fields["file"]),
        key=_text(fields["key"]),
        largest=float(fields["largest"]),
        model_call=_count(fields.get("model_call", 0)),
        model=_count(fields.get("model", 0)),
        order=_count(fields.get("order", 0)),
        placement=None if place is None else _placement(place),
        inputs=tuple(map(_text, fields.get("inputs", ()))),
    )


def _placement(fields: Mapping[str, Any]) -> Placement:
    shape = _counts(fields["shape"])
    runs = tuple(tuple((_count(first), _count(count)) for first, count in of_dim) for of_dim in fields.get("runs", ()))
    ends = [max((first + count for first, count in of_dim), default=0) for of_dim in runs]
    if runs and (len(ends) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True))):
        raise ValueError(f"{runs} are no positions in {list(shape)}")
    return Placement(shape, _counts(fields["start"]), _counts(fields["summed_over"]), runs)


def _collective(fields: Mapping[str, Any]) -> CollectiveEvent:
    return CollectiveEvent(
        step=_count(fields["step"]),
        operation=_text(fields["operation"]),
        ranks=_counts(fields.get("ranks", ())),
        shape=_counts(fields.get("shape", ())),
        dtype=_text(fields.get("dtype", "")),
        reduction=_text(fields.get("reduction", "")),
        group=_text(fields.get("group", "")),
        module=_text(fields.get("module", "")),
        phase=_text(fields.get("phase", "")),
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _counts(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, _text(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r}")
    return dtype
