"""Actions of a pipeline schedule: one step of a rank for one stage and one microbatch, and its text notation.

`verification` checks orders of actions; this module does not know about ranks.
"""

import re
from dataclasses import dataclass
from enum import StrEnum


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
    output of microbatch 3 to stage 1, which receives it by `1RA3<0`; `1SG3>0` and `0RG3<1` are its gradient's way back.
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
        """The action at the other end of a message."""
        if self.peer is None:
            raise ValueError(f"{self} computes; only actions that send or receive have a counterpart")
        return Action(_COUNTERPART[self.kind], self.peer, self.microbatch, self.stage)

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.stage}{self.kind}{self.microbatch}"
        return f"{self.stage}{self.kind}{self.microbatch}{'>' if self.kind in SENDS else '<'}{self.peer}"


def parse_action(text: str) -> Action:
    """The action that is written so.

    Raises:
        ValueError: `text` is not `<stage><kind><microbatch>`, with `><stage>` or `<<stage>` behind a send or receive.
    """
    match = _NOTATION.fullmatch(text.strip())
    if match is not None:
        stage, kind, microbatch, _, peer = match.groups()
        if (peer is not None) == (kind in COMMUNICATION):
            action = Action(ActionKind(kind), int(stage), int(microbatch), None if peer is None else int(peer))
            if str(action) == text.strip():
                return action
    raise ValueError(
        f"action {text.strip()!r} is not understood; expected stage, kind and microbatch, such as 0F3, 1B0, 1I0 or "
        "1W0, or with the stage at the other end 0SA3>1, 1RA3<0, 1SG3>0 or 0RG3<1"
    )
