"""How a tensor of a candidate compares with the reference's."""

from dataclasses import dataclass
from enum import Enum

from nxd_parity.bounds import Distance
from nxd_parity.events import TensorEvent
from nxd_parity.places import Place
from nxd_parity.sequence import Key


class Status(Enum):
    """How a tensor compares."""

    AGREES = "agrees"
    SUM = "ranks have parts of a sum"
    DIFFERS = "differs"
    UNKNOWN = "not compared"


@dataclass(frozen=True)
class Piece:
    """A rank's tensor, and the part of the whole that it should be.

    Attributes:
        rank: the candidate's rank.
        event: what was recorded.
        place: its place; None if there is none.
        scale: the factor that a gradient of an activation has on this rank, as where a loss is a mean over its rows.
    """

    rank: int
    event: TensorEvent
    place: Place | None
    scale: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a tensor of the candidate compares.

    Attributes:
        key: what the tensor is.
        status: the result.
        pieces: all ranks' tensors.
        differing: those that differ.
        apart: how far the first of those differs.
        summed_over: the ranks whose parts add up.
        reason: why it was not compared.
    """

    key: Key
    status: Status
    pieces: tuple[Piece, ...] = ()
    differing: tuple[Piece, ...] = ()
    apart: Distance | None = None
    summed_over: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """A fault and what is known about it; see `Finding`. A `place` is where it is, if it is not where it shows."""

    fault: str
    detail: str = ""
    factor: float = 1.0
    axis: str = ""
    place: str = ""
