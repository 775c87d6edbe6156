"""Computes a graph's memory: the bytes alive at once when its instructions run in the order of the text.

That order is the compiler's schedule if the header says `is_scheduled=true`; before compilation it is any order in
which operands come first. The assumptions, which the report repeats, are:

- Arguments live for the whole step, unless they are donated to a result (`input_output_alias`), which then takes their
  place. Results live to the end.
- A bitcast, a reshape, a transpose that only renames dims, a tuple and the state of a `while` are views of operands.
- Broadcasts, iotas and constants take no memory: they are computed where they are read. All other results are written
  to memory, so before compilation, which fuses elementwise chains, the number is an upper bound. A fusion in a compiled
  graph takes the memory of its result.
- A called computation (a loop's body, a branch) adds its own peak, without its arguments, while it runs.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from nxd_doctor.graphs.hlo import Computation, HloModule, Instruction
from nxd_doctor.graphs.parse import integers

_VIEWS = ("bitcast", "reshape", "while", "opt-barrier", "domain", "copy-done", "all-reduce-done", "async-done")
_NEVER_WRITTEN = ("parameter", "constant", "broadcast", "iota")
_RUNS_WHAT_IT_CALLS = ("while", "call", "conditional", "async-start")

Elements: TypeAlias = tuple[frozenset[str], ...]  # per tuple element, the instructions that made its buffers


@dataclass(frozen=True)
class LiveBuffer:
    """A result that is alive at the peak.

    Attributes:
        name: name of the instruction that made it.
        shape: the shape, such as "f32[8,16]".
        num_bytes: size in bytes.
        place: its origin, as in `Instruction.place`.
    """

    name: str
    shape: str
    num_bytes: int
    place: str


@dataclass(frozen=True)
class Memory:
    """Bytes of one run of a graph on one rank.

    Attributes:
        peak: the most bytes alive at once.
        arguments: bytes of the arguments: weights, optimizer state, data.
        results: bytes of the results, without those that take the place of an argument.
        peak_at: name of the instruction at which the peak is reached.
        largest: the largest buffers alive then besides the arguments, largest first.
    """

    peak: int
    arguments: int
    results: int
    peak_at: str
    largest: tuple[LiveBuffer, ...]

    @property
    def temporaries(self) -> int:
        """Bytes at the peak besides the arguments."""
        return self.peak - self.arguments


def peak_memory(module: HloModule, *, updates_in_place: bool = False, largest: int = 10) -> Memory:
    """Compute the peak of live bytes over the entry computation.

    Args:
        module: a graph, before or after compilation.
        updates_in_place: whether a result with the shape and dtype of an argument overwrites it, each argument once,
            scalars never. torch-xla requests this for updated weights and optimizer states, but its dumps do not say
            so.
        largest: number of buffers alive at the peak to return.
    """
    donated = _donated_results(module)
    if updates_in_place and not donated:
        donated = _results_like_arguments(module)
    peak = _peak_of(module, module.main, donated)
    arguments = sum(parameter.shape.num_bytes for parameter in module.parameters)
    made = sorted((module.main.by_name[name] for name in peak.alive), key=lambda item: -item.shape.num_bytes)
    buffers = [LiveBuffer(item.name, str(item.shape), item.shape.num_bytes, item.place) for item in made]
    return Memory(arguments + peak.num_bytes, arguments, peak.results, peak.at, tuple(buffers[:largest]))


@dataclass(frozen=True)
class _Peak:
    num_bytes: int
    results: int
    at: str
    alive: tuple[str, ...]


def _peak_of(module: HloModule, computation: Computation, donated: frozenset[str] = frozenset()) -> _Peak:
    """The peak of what the computation writes, without arguments or `donated` results, which overwrite them."""
    order = computation.instructions
    views = _views(computation)
    sizes = {item.name: _written_bytes(item, views) if item.name not in donated else 0 for item in order}
    last_use = {item.name: position for position, item in enumerate(order)}  # for results that are never read
    last_use |= {
        buffer: at for at, item in enumerate(order) for name in item.operands for buffer in _buffers(views[name])
    }
    ends: dict[int, list[str]] = {}
    for buffer, position in last_use.items():  # results end last: the root reads them
        ends.setdefault(position, []).append(buffer)
    now, peak, peak_at = 0, 0, 0
    for position, item in enumerate(order):
        now += sizes[item.name]
        during = max(now, now - sizes[item.name] + _inner_peak(module, item))  # the called computation makes its result
        if during > peak:
            peak, peak_at = during, position
        now -= sum(sizes[buffer] for buffer in ends.get(position, ()))
    return _Peak(
        num_bytes=peak,
        results=sum(sizes[buffer] for buffer in _buffers(views[computation.root.name])),
        at=order[peak_at].name,
        alive=tuple(it.name for it in order[: peak_at + 1] if sizes[it.name] and last_use[it.name] >= peak_at),
    )


def _inner_peak(module: HloModule, item: Instruction) -> int:
    if item.opcode not in _RUNS_WHAT_IT_CALLS:
        return 0
    return max((_peak_of(module, module.computations[name]).num_bytes for name in item.called), default=0)


def _views(computation: Computation) -> dict[str, Elements]:
    """For each instruction and each element of its result: the instructions whose buffers it refers to."""
    views: dict[str, Elements] = {}
    for item in computation.instructions:
        of_operands = [views[operand] for operand in item.operands]
        if item.opcode == "tuple":
            views[item.name] = tuple(_buffers(elements) for elements in of_operands)
        elif item.opcode == "get-tuple-element":
            elements = of_operands[0]
            views[item.name] = (elements[int(item.attributes["index"])] if len(elements) > 1 else elements[0],)
        elif _is_view(item, computation):
            views[item.name] = of_operands[0]
        else:
            views[item.name] = (frozenset({item.name}),)
    return views


def _buffers(elements: Elements) -> frozenset[str]:
    return frozenset[str]().union(*elements)


def _is_view(item: Instruction, computation: Computation) -> bool:
    if item.opcode == "transpose":
        permutation, source = integers(item.attributes["dimensions"]), computation.by_name[item.operands[0]]
        return tuple(permutation[dim] for dim in item.shape.arrays[0].order) == source.shape.arrays[0].order
    return item.opcode in _VIEWS


def _written_bytes(item: Instruction, views: dict[str, Elements]) -> int:
    owns_memory = item.name in _buffers(views[item.name]) and item.opcode not in _NEVER_WRITTEN
    return item.shape.num_bytes if owns_memory else 0


def _donated_results(module: HloModule) -> frozenset[str]:
    """The instructions that overwrite an argument according to the header: "{ {0}: (1, {}, may-alias), ... }"."""
    results = _results(module)
    places = re.findall(r"\{([\d, ]*)\}:", module.attributes.get("input_output_alias", ""))
    return frozenset[str]().union(*(_buffers(results[_first(place)]) for place in places))


def _results_like_arguments(module: HloModule) -> frozenset[str]:
    free = Counter(str(parameter.shape) for parameter in module.parameters if parameter.shape.arrays[0].dims)
    donated = set[str]()
    for elements in _results(module):
        for name in _buffers(elements):
            item = module.main.by_name[name]
            shape = str(item.shape)
            if item.opcode != "parameter" and name not in donated and free[shape]:
                free[shape] -= 1
                donated.add(name)
    return frozenset(donated)


def _results(module: HloModule) -> list[Elements]:
    """The buffers that each element of the entry's result refers to."""
    return [(element,) for element in _views(module.main)[module.main.root.name]]


def _first(place: str) -> int:
    numbers = integers(place)
    return numbers[0] if numbers else 0
