"""What a comparison finds: the first difference and those that follow from it, as data and as text."""

from dataclasses import asdict, dataclass, field
from typing import Any

MISSING_SUM = "missing sum"
SUMMED_TWICE = "summed twice"
SCALED = "scaled"
WRONG_SHARD = "wrong shard or order"
STALE = "stale values"
RANDOM_NUMBERS = "random numbers"
DROPPED_TOKENS = "dropped tokens"
DIFFERENT_DATA = "different data"
WRONG_AVERAGING = "wrong averaging"
OTHER_STATE = "state of another parameter"
DRIFT = "drift"
LOWER_PRECISION = "lower precision"
DIFFERENT_VALUES = "different values"


@dataclass(frozen=True)
class Finding:
    """A tensor that differs from the reference.

    Attributes:
        step: the step, from 1; 0 is before the first.
        kind: the kind of tensor, one of `events.KINDS`.
        name: the module or parameter where the fault is.
        tensor: the module or parameter whose tensor shows it, if that is another one.
        fault: what is wrong, such as "missing sum".
        detail: the same in a sentence.
        ranks: the ranks whose values differ.
        factor: what the values are multiplied by, for faults that scale them; else 1.
        axis: the groups of ranks that have that size, such as "groups of 2 ranks"; may be empty.
        largest: the largest absolute difference.
        relative: the same, relative to the largest expected value.
        index: where that is, in the whole tensor.
        expected: the value there in the reference.
        found: the value there in the candidate.
    """

    step: int
    kind: str
    name: str
    tensor: str = ""
    fault: str = DIFFERENT_VALUES
    detail: str = ""
    ranks: tuple[int, ...] = ()
    factor: float = 1.0
    axis: str = ""
    largest: float = 0.0
    relative: float = 0.0
    index: tuple[int, ...] = ()
    expected: float = 0.0
    found: float = 0.0

    def __str__(self) -> str:
        name = self.name or "the whole model"
        text = f"step {self.step}, {self.kind}, {name}: {self.fault}"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass
class Report:
    """The outcome of a comparison.

    Attributes:
        reference: the reference's folder.
        candidate: the candidate's folder.
        ranks: the number of the candidate's ranks.
        steps: the number of steps that both have.
        findings: what differs, the first difference first; empty if all agree.
        agree: how many tensors of each kind agree.
        not_compared: tensors that could not be compared, and why.
        notes: what else was seen.
    """

    reference: str
    candidate: str
    ranks: int
    steps: int = 0
    findings: list[Finding] = field(default_factory=list)
    agree: dict[str, int] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """The first difference."""
        return self.findings[0] if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self) | {"agrees": self.agrees}

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {plural(kind, count)}" for kind, count in self.agree.items())
        lines = [f"{self.candidate} ({self.ranks} ranks) against {self.reference}, {self.steps} steps"]
        if self.first is None:
            lines.append(f"{counts} agree")
        else:
            lines.append(f"DIFFERENT  {self.first}")
            lines.append(f"{counts or 'nothing'} agree; {len(self.findings) - 1} more tensors differ after it")
        lines += self.notes
        if self.not_compared:
            name, reason = next(iter(self.not_compared.items()))
            lines.append(f"{len(self.not_compared)} tensors were not compared, such as {name}: {reason}")
        return "\n".join(lines)


def plural(kind: str, count: int) -> str:
    """Return a kind of tensor in the plural if there are several."""
    if count == 1:
        return kind
    return "losses" if kind == "loss" else f"{kind}s"
