"""Conversions between number types in a graph: where precision is lost, and where memory goes to copies."""

from collections.abc import Iterable
from dataclasses import dataclass

from nxd_doctor.graphs.hlo import HloModule
from nxd_doctor.graphs.repeats import count_runs


@dataclass(frozen=True)
class Cast:
    """One or several conversions between the same types at the same place.

    Attributes:
        source, target: XLA's names of the types.
        place: where they are from, as `Instruction.place` says.
        count: how many run in a step.
        num_bytes: of their results, in a step.
    """

    source: str
    target: str
    place: str
    count: int
    num_bytes: int


def find_casts(module: HloModule) -> list[Cast]:
    """The conversions of arrays that a step runs, the largest first; not those of scalars, nor to the same type."""
    runs = count_runs(module)
    casts = []
    for name, computation in module.computations.items():
        operands = computation.by_name
        for item in computation.instructions:
            if item.opcode != "convert" or not runs[name]:
                continue
            source, target = operands[item.operands[0]].shape.arrays[0], item.shape.arrays[0]
            if source.dtype != target.dtype and target.dims:
                size = target.num_bytes * runs[name]
                casts.append(Cast(source.dtype, target.dtype, item.place, runs[name], size))
    return _by_place(casts)


def _by_place(casts: Iterable[Cast]) -> list[Cast]:
    sums: dict[tuple[str, str, str], Cast] = {}
    for cast in casts:
        key = cast.source, cast.target, cast.place
        before = sums.get(key, Cast(*key, 0, 0))
        sums[key] = Cast(*key, before.count + cast.count, before.num_bytes + cast.num_bytes)
    return sorted(sums.values(), key=lambda cast: -cast.num_bytes)
