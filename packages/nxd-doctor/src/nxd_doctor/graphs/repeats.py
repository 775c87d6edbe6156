"""Counts how often each computation of a module runs in one step, loops included."""

import re
from collections import Counter

from nxd_doctor.graphs.hlo import HloModule, Instruction

# These apply a scalar function to every element; the function is part of the instruction itself.
_APPLY = ("reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter", "all-reduce", "reduce-scatter")
_CONTINUE = ("async-update", "async-done")  # of an async-start's computation, which some compilers name again here
_TRIP_COUNT = re.compile(r"known_trip_count\W+n\W+(\d+)")


def trip_count(loop: Instruction) -> int | None:
    """How often a `while` runs its body, if the compiler has recorded it; else None."""
    found = _TRIP_COUNT.search(loop.attributes.get("backend_config", ""))
    return int(found[1]) if found else None


def count_runs(module: HloModule) -> Counter[str]:
    """Count the runs of each called computation in one run of the entry, by name.

    The body of a `while` counts once if the compiler has not recorded its trip count, and so does each branch of a
    conditional. Functions applied to elements, such as a reduction's, are not counted.
    """
    runs: Counter[str] = Counter()
    waiting = [(module.entry, 1)]
    while waiting:
        name, times = waiting.pop()
        runs[name] += times
        for instruction in module.computations[name].instructions:
            if instruction.opcode.removesuffix("-start") in _APPLY or instruction.opcode in _CONTINUE:
                continue
            inner = times * (trip_count(instruction) or 1) if instruction.opcode == "while" else times
            waiting.extend((called, inner) for called in instruction.called)
    return runs


def loops_counted_once(module: HloModule) -> tuple[str, ...]:
    """Names of the `while` instructions with unknown trip counts."""
    return tuple(item.name for item in module.instructions() if item.opcode == "while" and trip_count(item) is None)
