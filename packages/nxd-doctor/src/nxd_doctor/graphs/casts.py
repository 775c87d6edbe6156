"""Finds dtype conversions in a graph: where precision is lost, and where copies take memory."""

from collections.abc import Iterable
from dataclasses import dataclass

from nxd_doctor.graphs.hlo import HloModule
from nxd_doctor.graphs.repeats import count_runs


@dataclass(frozen=True)
class Cast:
    """All conversions between the same dtypes at the same place.

    Attributes:
        source, target: XLA's names of the dtypes.
        place: their origin, as in `Instruction.place`.
        count: number of runs per step.
        num_bytes: bytes of their results per step.
    """

    source: str
    target: str
    place: str
    count: int
    num_bytes: int


def find_casts(module: HloModule) -> list[Cast]:
    """The array conversions that a step runs, largest first; without scalars and conversions to the same dtype."""
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
