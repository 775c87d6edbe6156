"""Compares two graphs: whether they are the same program, and if not, where they first differ.

It is used for two ranks, which should build the same graph, and for two steps, where a difference means recompilation.
Instruction names and metadata do not matter.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nxd_doctor.graphs.hlo import Computation, HloModule, Instruction


@dataclass(frozen=True)
class GraphDifference:
    """Where two graphs first differ.

    Attributes:
        kind: "parameter", "shape", "constant", "operation", "replica groups", "attribute", "operands" or "length".
        place: module path or source line of the difference, else the instruction's name.
        words: the difference described in a sentence.
    """

    kind: str
    place: str
    words: str

    def __str__(self) -> str:
        return self.words


def first_difference(
    left: HloModule, right: HloModule, *, names: tuple[str, str] = ("the first", "the second")
) -> GraphDifference | None:
    """Find the first difference; None if both are the same program.

    Differences between arguments come first: a batch of another shape changes everything after it.

    Args:
        names: names for the two graphs, such as ("rank 0", "rank 1").
    """
    if len(left.parameters) != len(right.parameters):
        return _number_of_arguments(left, right, names)
    for number, (ours, theirs) in enumerate(zip(left.parameters, right.parameters, strict=True)):
        if ours.shape != theirs.shape:
            words = (
                f"argument {number} is {ours.shape} in {names[0]} and {theirs.shape} in {names[1]} "
                f"({ours.place}): a tensor whose shape changes makes another graph"
            )
            return GraphDifference("parameter", ours.place, words)
    return next(_differences(left, right, names), None)


def _differences(left: HloModule, right: HloModule, names: tuple[str, str]) -> Iterator[GraphDifference]:
    """The differences in the entry and in the computations it calls, in call order."""
    waiting, compared = [(left.main, right.main)], {(left.entry, right.entry)}
    while waiting:
        ours, theirs = waiting.pop(0)
        yield from _in_computation(ours, theirs, names)
        for mine, other in zip(ours.instructions, theirs.instructions, strict=False):
            for called, matching in zip(mine.called, other.called, strict=False):
                if (called, matching) not in compared:
                    compared.add((called, matching))
                    waiting.append((left.computations[called], right.computations[matching]))


def _in_computation(left: Computation, right: Computation, names: tuple[str, str]) -> Iterator[GraphDifference]:
    positions = [{item.name: at for at, item in enumerate(side.instructions)} for side in (left, right)]
    for number, (ours, theirs) in enumerate(zip(left.instructions, right.instructions, strict=False), start=1):
        kind = _kind_of_difference(ours, theirs, positions)
        if kind:
            where = f"instruction {number} of {len(left.instructions)} ({ours.place})"
            shown = [_show(item, kind) for item in (ours, theirs)]
            yield GraphDifference(
                kind, ours.place, f"{where}: {kind} {shown[0]} in {names[0]}, {shown[1]} in {names[1]}"
            )
    if len(left.instructions) != len(right.instructions):
        longer, name = max((left, names[0]), (right, names[1]), key=lambda side: len(side[0].instructions))
        extra = longer.instructions[min(len(left.instructions), len(right.instructions))]
        words = (
            f"{left.name} has {len(left.instructions)} instructions in {names[0]} and {len(right.instructions)} in "
            f"{names[1]}; the first that only {name} has is {extra.opcode} {extra.shape} ({extra.place})"
        )
        yield GraphDifference("length", extra.place, words)


def _kind_of_difference(ours: Instruction, theirs: Instruction, positions: list[dict[str, int]]) -> str:
    """The kind of difference between two instructions; empty if there is none."""
    if ours.opcode != theirs.opcode:
        return "operation"
    if ours.shape != theirs.shape:
        return "shape"
    if ours.literal != theirs.literal:
        return "constant"
    different = {
        key
        for key in ours.attributes.keys() | theirs.attributes.keys()
        if ours.attributes.get(key) != theirs.attributes.get(key) and not _names_computations(ours, key)
    }
    if different:
        return "replica groups" if different & {"replica_groups", "source_target_pairs"} else "attribute"
    at = [[where[name] for name in item.operands] for where, item in zip(positions, (ours, theirs), strict=True)]
    return "operands" if at[0] != at[1] or ours.is_root != theirs.is_root else ""


def _names_computations(item: Instruction, key: str) -> bool:
    return any(called in item.attributes.get(key, "") for called in item.called)


def _show(item: Instruction, kind: str) -> str:
    if kind == "constant":
        return f"{item.shape} {item.literal}"
    if kind == "replica groups":
        return item.attributes.get("replica_groups") or item.attributes.get("source_target_pairs", "none")
    if kind == "attribute":
        shown = ", ".join(f"{key}={value}" for key, value in item.attributes.items())
        return f"{item.opcode} {item.shape} with {shown or 'none'}"
    if kind == "operands":
        return f"{item.opcode} of {', '.join(item.operands)}"
    return f"{item.opcode} {item.shape}"


def _number_of_arguments(left: HloModule, right: HloModule, names: tuple[str, str]) -> GraphDifference:
    sides = left.parameters, right.parameters
    longer = max(sides, key=len)
    pairs = enumerate(zip(*sides, strict=False))
    first = next((number for number, (ours, theirs) in pairs if ours.shape != theirs.shape), min(map(len, sides)))
    extra = longer[first]
    words = (
        f"{len(sides[0])} arguments in {names[0]} and {len(sides[1])} in {names[1]}; the first that differs is "
        f"{extra.shape} ({extra.place}): probably a state that the first step creates, or a number that is data in "
        "one and a constant in the other"
    )
    return GraphDifference("parameter", extra.place, words)
