"""What a comparison finds: the first difference and those that follow from it, as data and as text."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nxd_parity.events import LOSS

MISSING_SUM = "missing sum"
MISSING_TERM = "missing term"
SUMMED_TWICE = "summed twice"
SCALED = "scaled"
WRONG_SHARD = "wrong shard or order"
STALE = "stale values"
RANDOM_NUMBERS = "random numbers"
WRONG_POSITIONS = "wrong positions"
WRONG_MASK = "wrong mask"
NOT_CALLED = "module not called"
CALLED_AGAIN = "module called again"
DROPPED_TOKENS = "dropped tokens"
DIFFERENT_DATA = "different data"
WRONG_AVERAGING = "wrong averaging"
OTHER_STATE = "state of another parameter"
DRIFT = "drift"
LOWER_PRECISION = "lower precision"
DIFFERENT_VALUES = "different values"
ORDER = "collectives in different orders"


@dataclass(frozen=True)
class Finding:
    """A tensor that differs from the reference.

    Attributes:
        step: the step, from 1; 0 is before the first.
        kind: the kind of tensor, one of `events.KINDS`; "collective" if ranks call different ones.
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

    @property
    def shown_in(self) -> str:
        """The module or parameter whose tensor differs."""
        return self.tensor or self.name

    def __str__(self) -> str:
        name = self.name or "the whole model"
        text = f"step {self.step}, {self.kind}, {name}: {self.fault}"
        return f"{text}; {self.detail}" if self.detail else text


AGREES = "agrees"
DIFFERS_FIRST = "differs first"
DIFFERS_LATER = "differs later"
WITHOUT_EFFECT = "differs without effect"
NOT_COMPARED = "not compared"
STATUSES = (DIFFERS_FIRST, DIFFERS_LATER, WITHOUT_EFFECT, NOT_COMPARED, AGREES)  # the worst first


@dataclass(frozen=True)
class Location:
    """Where in a tensor its values differ, and which ranks have which part.

    The picture is the plane of the tensor through its largest difference, in at most 64 x 64 cells of equally many
    elements.

    Attributes:
        shape: shape of the whole tensor.
        index: where the largest difference is, in the whole tensor; empty if the values do not differ but no rank has
            some of them.
        rank: the rank that has it; -1 if there is none.
        part: for each dim, the first and last position of the rank's shard around it; empty if the rank has a range of
            the flattened tensor.
        flat: the first and last position of that range.
        share: the share of the ranks' elements that differ.
        dims: the dims of the picture's rows and columns; a tensor of one dim has one row, and no dim for it.
        cell: how many elements a cell has along rows and columns.
        differences: rows of cells: 0 agrees, 9 is the largest difference, each step between them half a power of ten.
        holders: the sets of ranks that have the same elements.
        owners: rows of cells: the set of ranks that has the cell's first element, as an index of `holders`; -1 if no
            rank has it.
    """

    shape: tuple[int, ...]
    index: tuple[int, ...]
    rank: int
    part: tuple[tuple[int, int], ...]
    flat: tuple[int, ...]
    share: float
    dims: tuple[int, ...]
    cell: tuple[int, int]
    differences: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[int, ...], ...]
    owners: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        """Return a sentence: the position, the shard, and how far the shard's border is."""
        if not self.index:
            return f"some of {list(self.shape)} is on no rank"
        text = f"at {list(self.index)} of {list(self.shape)}"
        if self.flat:
            shard = _shard(self.flat[0], self.flat[1], self._flat_index(), math.prod(self.shape))
            return f"{text}; rank {self.rank} has {shard} of the flattened tensor"
        shards = [
            f"{_shard(first, last, at, size)} of dim {dim}"
            for dim, ((first, last), at, size) in enumerate(zip(self.part, self.index, self.shape, strict=True))
            if (first, last) != (0, size - 1)
        ]
        return f"{text}; rank {self.rank} has {' and '.join(shards) or 'the whole tensor'}"

    def _flat_index(self) -> int:
        flat = 0
        for at, size in zip(self.index, self.shape, strict=True):
            flat = flat * size + at
        return flat

    def to_json(self) -> dict[str, Any]:
        """Return plain values; rows of cells are strings."""
        return asdict(self) | {
            "differences": ["".join(map(str, row)) for row in self.differences],
            "owners": [" ".join(map(str, row)) for row in self.owners],
        }


def _shard(first: int, last: int, at: int, size: int) -> str:
    """Describe a range of positions, and how far one of them is from the nearest border with another range."""
    before, after = (at - first if first else None), (last - at if last < size - 1 else None)
    nearest = min(it for it in (before, after) if it is not None)
    return f"{first}..{last} ({'at the border' if nearest == 0 else f'{nearest} from the border'})"


@dataclass
class Report:
    """The outcome of a comparison.

    Attributes:
        reference: the reference's folder.
        candidate: the candidate's folder.
        ranks: the number of the candidate's ranks.
        steps: the number of steps that both have.
        findings: what differs, the first difference first, at most 50 tensors; empty if all agree.
        different: how many there are in all.
        agree: how many tensors of each kind agree.
        not_compared: tensors that could not be compared, and why.
        notes: what else was seen.
        tensors: what became of each tensor, one of `STATUSES`, by step, kind and name.
        location: where in its tensor the first difference lies; None if that is not known, as of a loss.
    """

    reference: str
    candidate: str
    ranks: int
    steps: int = 0
    findings: list[Finding] = field(default_factory=list)
    different: int = 0
    agree: dict[str, int] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tensors: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)
    location: Location | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """The first difference."""
        return self.findings[0] if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values; numbers that JSON does not have are strings, such as "inf"."""
        location = None if self.location is None else self.location.to_json()
        plain: dict[str, Any] = _plain(asdict(self) | {"agrees": self.agrees, "location": location})
        return plain

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {plural(kind, count)}" for kind, count in self.agree.items())
        lines = [f"{self.candidate} ({self.ranks} ranks) against {self.reference}, {self.steps} steps"]
        if self.first is None:
            lines.append(f"{counts} agree")
        else:
            where = [f"shown in {self.first.tensor}"] if self.first.tensor else []
            if 0 < len(self.first.ranks) < self.ranks and self.first.kind != LOSS:  # which is that of all ranks
                where.insert(0, f"on {plural('rank', len(self.first.ranks))} {', '.join(map(str, self.first.ranks))}")
            lines.append("; ".join([f"DIFFERENT  {self.first}", *where]))
            later = max(self.different, len(self.findings)) - 1
            lines.append(f"{counts or 'nothing'} agree; {later} more tensors differ after it")
        lines += self.notes
        if self.not_compared:
            name, reason = next(iter(self.not_compared.items()))
            lines.append(f"{len(self.not_compared)} tensors were not compared, such as {name}: {reason}")
        return "\n".join(map(printable, lines))


def printable(text: str) -> str:
    """Return a text with escapes in place of what is no printable character, as names from a recording may have."""
    return "".join(it if it.isprintable() else it.encode("unicode_escape").decode("ascii") for it in text)


def runs(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order, with runs such as `0..3`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}..{b}" for a, b in found]
    return ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(it) for key, it in value.items()}
    return [_plain(it) for it in value] if isinstance(value, list | tuple) else value


def plural(kind: str, count: int) -> str:
    """Return a kind of tensor in the plural if there are several."""
    if count == 1:
        return kind
    return "losses" if kind == "loss" else f"{kind}s"
