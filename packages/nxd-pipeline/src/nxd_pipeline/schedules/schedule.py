"""A pipeline schedule as data: one list of actions per pipeline rank, and which rank holds which stage.

An action is one step of a rank for one stage and one microbatch. It has a text form, so a schedule can be written as
CSV: one line per rank, one action per cell, as in `0F0,0SA0>1,0F1,0SA1>1,0RG0<1,0B0`. Empty cells are idle time and are
ignored, so tables whose columns line up in time can be read as well, among them the computations that
torch.distributed.pipelining dumps.

`catalog` builds schedules by known methods; `communication` adds messages to an order of computation;
`verification` checks the result.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import count
from pathlib import Path


class ActionKind(StrEnum):
    """The kind of an action; the value is its notation, as in `0F3`: stage 0, forward, microbatch 3."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and weights together
    BACKWARD_INPUT = "I"  # gradients of the stage's inputs, which the stages before it wait for
    BACKWARD_WEIGHT = "W"  # gradients of the stage's weights, which no other stage waits for
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"

    @property
    def label(self) -> str:
        """A name for pictures, such as "backward of inputs"."""
        return _LABELS[self]


_LABELS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
    ActionKind.SEND_ACTIVATION: "send activation",
    ActionKind.RECV_ACTIVATION: "wait for activation",
    ActionKind.SEND_GRADIENT: "send gradient",
    ActionKind.RECV_GRADIENT: "wait for gradient",
}

SENDS = frozenset({ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT})
RECEIVES = frozenset({ActionKind.RECV_ACTIVATION, ActionKind.RECV_GRADIENT})
COMMUNICATION = SENDS | RECEIVES
MAKES_GRADIENT = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT})  # of a stage's inputs

_COUNTERPART = {
    ActionKind.SEND_ACTIVATION: ActionKind.RECV_ACTIVATION,
    ActionKind.RECV_ACTIVATION: ActionKind.SEND_ACTIVATION,
    ActionKind.SEND_GRADIENT: ActionKind.RECV_GRADIENT,
    ActionKind.RECV_GRADIENT: ActionKind.SEND_GRADIENT,
}
_NOTATION = re.compile(r"(\d+)(F|B|I|W|SA|RA|SG|RG)(\d+)(?:([<>])(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of the rank of `stage` for one microbatch.

    Written `0F3` where it computes. Communication also names the stage at the other end: `0SA3>1` sends stage 0's
    output of microbatch 3 to stage 1, which receives it by `1RA3<0`; `1SG3>0` and `0RG3<1` send the gradient back.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if (self.peer is not None) != (self.kind in COMMUNICATION):
            expected = "needs the stage at the other end as" if self.peer is None else "computes and takes no"
            raise ValueError(f"action {self.stage}{self.kind}{self.microbatch} {expected} peer, peer={self.peer}")

    @property
    def is_communication(self) -> bool:
        """Whether it sends or receives; else it computes."""
        return self.peer is not None

    def counterpart(self) -> "Action":
        """Return the action at the other end of a message."""
        if self.peer is None:
            raise ValueError(f"{self} computes; only actions that send or receive have a counterpart")
        return Action(_COUNTERPART[self.kind], self.peer, self.microbatch, self.stage)

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.stage}{self.kind}{self.microbatch}"
        return f"{self.stage}{self.kind}{self.microbatch}{'>' if self.kind in SENDS else '<'}{self.peer}"


def parse_action(text: str) -> Action:
    """Parse the notation of an action.

    Raises:
        ValueError: `text` is not `<stage><kind><microbatch>`, followed by `><stage>` or `<<stage>` for a message.
    """
    match = _NOTATION.fullmatch(text.strip())
    if match is not None:
        stage, kind, microbatch, _, peer = match.groups()
        if (peer is not None) == (kind in COMMUNICATION):
            action = Action(ActionKind(kind), int(stage), int(microbatch), None if peer is None else int(peer))
            if str(action) == text.strip():
                return action
    raise ValueError(
        f"action {text.strip()!r} cannot be parsed; expected stage, kind and microbatch, such as 0F3, 1B0, 1I0 or "
        "1W0, or with the stage at the other end 0SA3>1, 1RA3<0, 1SG3>0 or 0RG3<1"
    )


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank in one step, in order.

    Attributes:
        name: name for errors and pictures.
        num_microbatches: number of microbatches, counted from 0.
        rank_of_stage: the pipeline rank of each stage.
        actions: actions of each pipeline rank.

    Raises:
        ValueError: an action's stage is not on its rank, or a stage, rank or microbatch does not exist.
    """

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f"schedule {self.name!r}: num_microbatches={self.num_microbatches}; use 1 or more")
        if not self.actions or set(self.rank_of_stage) != set(range(self.num_ranks)):
            raise ValueError(
                f"schedule {self.name!r} has actions for {self.num_ranks} ranks but stages on ranks "
                f"{self.rank_of_stage}; assign every rank a stage, and every stage one of these ranks"
            )
        for rank, actions in enumerate(self.actions):
            stages = frozenset(self.stages_of(rank))
            for position, action in enumerate(actions):
                if action.stage not in stages:
                    raise ValueError(f"{self.where(rank, position)}: the stages of this rank are {sorted(stages)}")
                if not 0 <= action.microbatch < self.num_microbatches:
                    raise ValueError(f"{self.where(rank, position)}: num_microbatches={self.num_microbatches}")
                if action.peer is not None and not 0 <= action.peer < self.num_stages:
                    raise ValueError(f"{self.where(rank, position)}: stages are 0 to {self.num_stages - 1}")

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline; several may be on one rank."""
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.actions)

    @cached_property
    def is_forward_only(self) -> bool:
        """Whether the schedule has no backward, so that no activations are kept."""
        return all(action.kind is ActionKind.FORWARD for action in self.compute_actions())

    @cached_property
    def has_communication(self) -> bool:
        """Whether any rank sends or receives."""
        return any(action.is_communication for actions in self.actions for action in actions)

    def where(self, rank: int, position: int) -> str:
        """Describe an action for an error message."""
        return f"schedule {self.name!r}, rank {rank}, position {position} ({self.actions[rank][position]})"

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on a pipeline rank, ascending."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    def without_communication(self) -> "Schedule":
        """Return the same order of computation, without messages."""
        return replace(self, actions=tuple(tuple(it for it in row if not it.is_communication) for row in self.actions))

    def compute_actions(self) -> Iterable[Action]:
        """Yield the actions of all ranks that neither send nor receive."""
        return (action for actions in self.actions for action in actions if not action.is_communication)


def custom_schedule(actions: Sequence[Sequence[Action | str]], *, name: str = "custom") -> Schedule:
    """Make a schedule from one list per rank, of actions or their notation: `[["0F0", "0B0"], ["1F0", "1B0"]]`.

    A stage is on the rank of its actions. Messages may be omitted; `insert_communication` adds them.

    Raises:
        ValueError: an action cannot be parsed, a stage is on two ranks or on none, or there are no actions.
    """
    parsed = tuple(tuple(_parse(rank, action) for action in row) for rank, row in enumerate(actions))
    rank_of_stage: dict[int, int] = {}
    for rank, row in enumerate(parsed):
        for position, action in enumerate(row):
            if rank_of_stage.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"schedule {name!r}, rank {rank}, position {position} ({action}): stage {action.stage} is on "
                    f"rank {rank_of_stage[action.stage]} already; a stage belongs to one rank"
                )
    num_stages = max(rank_of_stage, default=-1) + 1
    if len(rank_of_stage) < max(num_stages, 1):
        missing = next(stage for stage in count() if stage not in rank_of_stage)
        raise ValueError(f"schedule {name!r}: no rank has actions of stage {missing}")
    return Schedule(
        name=name,
        num_microbatches=max(action.microbatch for row in parsed for action in row) + 1,
        rank_of_stage=tuple(rank_of_stage[stage] for stage in range(num_stages)),
        actions=parsed,
    )


def _parse(rank: int, action: Action | str) -> Action:
    if isinstance(action, Action):
        return action
    try:
        return parse_action(action)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None


def format_schedule(schedule: Schedule) -> str:
    """Return the schedule as CSV text, including any messages."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.actions)


def parse_schedule(text: str, *, name: str = "custom") -> Schedule:
    """Parse a schedule in CSV; a stage is on the rank of its line. Blank lines are ignored.

    Raises:
        ValueError: the text is not CSV, a cell is not an action, or the lines are not a schedule; see
            `custom_schedule`.
    """
    try:
        rows = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    except csv.Error as error:
        raise ValueError(
            f"schedule {name!r} is not CSV: {error}; write a line per rank and an action per cell"
        ) from None
    return custom_schedule([[cell for cell in row if cell.strip()] for row in rows if row], name=name)


def write_schedule(schedule: Schedule, file: str | Path) -> None:
    """Write the schedule as CSV."""
    Path(file).write_text(format_schedule(schedule), encoding="utf-8")


def read_schedule(file: str | Path) -> Schedule:
    """Read a schedule from a CSV file, named after the file; see `parse_schedule`."""
    return parse_schedule(Path(file).read_text(encoding="utf-8-sig"), name=Path(file).stem)
