"""What the forms of a report share: the facts about the first difference, counts, and the tree of modules."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nxd_parity import events
from nxd_parity.report import AGREES, DIFFERS_LATER, STATUSES, Report, printable, runs

MOST_LEVELS = 64  # of modules inside modules; what is below is one name


def headline(report: Report) -> str:
    """Return what was compared with what."""
    ranks, steps = _several(report.ranks, "rank"), _several(report.steps, "step")
    return printable(f"{report.candidate} ({ranks}) against {report.reference}, {steps}")


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what is known about the first difference, as labels and texts."""
    first = report.first
    if first is None:
        return
    of = "" if first.kind == events.PARAMETER else "of "
    yield "where", f"step {first.step}, {first.kind} {of}{shown(first.name)}"
    if first.tensor:
        yield "shown in", shown(first.tensor)
    yield "fault", printable(f"{first.fault}; {first.detail}" if first.detail else first.fault)
    share = 0.0 if report.location is None else report.location.share
    extent = "; all elements differ" if share == 1 else f"; {share:.2%} of the elements differ" if share else ""
    if first.ranks:
        yield "ranks", f"{runs(first.ranks)} of {report.ranks}{extent}"
    if first.largest:
        relative = f", apart by {first.relative:.2g} of the largest" if math.isfinite(first.relative) else ""
        yield "values", f"{first.found:.6g} instead of {first.expected:.6g}{relative}"
    if report.location is not None:
        yield "position", str(report.location)
    later = sum(counts[DIFFERS_LATER] for of_step in count(report).values() for counts in of_step.values())
    yield "after it", f"{_several(later, 'other tensor')} differ{'s' if later == 1 else ''}"


def count(report: Report) -> dict[int, dict[str, Counter[str]]]:
    """Return how many tensors have which status, by step and kind."""
    return {
        step: {kind: Counter(of_kind[kind].values()) for kind in events.KINDS if kind in of_kind}
        for step, of_kind in sorted(report.tensors.items())
    }


@dataclass
class Node:
    """A module or parameter in the tree of modules.

    Attributes:
        name: its own name, without that of the module around it.
        path: its whole name.
        tensors: the status of each of its tensors, by kind.
        children: what is in it, by name.
    """

    name: str = ""
    path: str = ""
    tensors: dict[str, str] = field(default_factory=dict)
    children: dict[str, "Node"] = field(default_factory=dict)

    def counts(self) -> Counter[str]:
        """Return how many of the tensors of it and of everything in it have which status."""
        total = Counter(self.tensors.values())
        for child in self.children.values():
            total += child.counts()
        return total

    @property
    def status(self) -> str:
        """The worst status in it."""
        counts = self.counts()
        return next((it for it in STATUSES if counts[it]), AGREES)

    def first_kind(self, status: str) -> str:
        """Return the kind of the first of its tensors, and of those in it, that has a status; empty if none has."""
        kinds = {kind for kind, it in self.tensors.items() if it == status}
        kinds |= {child.first_kind(status) for child in self.children.values()}
        return next((it for it in events.KINDS if any(_kind_of(label) == it for label in kinds)), "")

    def by_status(self) -> dict[str, list[str]]:
        """Return the kinds of its own tensors by their status, the worst status first."""
        found = {status: [kind for kind, it in self.tensors.items() if it == status] for status in STATUSES}
        return {status: kinds for status, kinds in found.items() if kinds}


def tree_of(tensors: Mapping[str, Mapping[str, str]]) -> Node:
    """Return the tree of the modules of a step.

    Args:
        tensors: the status of each tensor, by kind and name.
    """
    root = Node()
    for kind in (events.ACTIVATION, *events.KINDS):  # modules in the order in which they are called
        for name, status in tensors.get(kind, {}).items():
            path, state = owner_and_state(kind, name)
            node = root
            for part in parts_of(path):
                inner = f"{node.path}.{part}" if node is not root else part
                node = node.children.setdefault(part, Node(part, inner))
            node.tensors[f"{kind} {state}" if state else kind] = status
    return root


def _kind_of(label: str) -> str:
    return events.OPTIMIZER_STATE if label.startswith(events.OPTIMIZER_STATE) else label


def owner_and_state(kind: str, name: str) -> tuple[str, str]:
    """Return the module or parameter that a tensor belongs to, and the name of an optimizer's state."""
    if kind != events.OPTIMIZER_STATE:
        return name, ""
    owner, _, state = name.rpartition("/")
    return owner, state


def parts_of(path: str) -> list[str]:
    """Return the names on the way from the whole model to a module; none for the whole model."""
    return path.split(".", MOST_LEVELS - 1) if path else []


def step_title(step: int) -> str:
    """Return the title of a step; before the first there are the initial parameters."""
    return f"step {step}" if step else "initial"


def shown(name: str) -> str:
    """Return the name of a module or parameter as it is shown."""
    return printable(name) or "the whole model"


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
