"""The parts of an HLO module: shapes, instructions, computations, and how often each computation runs in a step.

They are plain data that `parse` builds from text.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from nxd_state.neuron_errors import module_path, source_line

# XLA's primitive types, in bits because some are smaller than a byte.
BITS = {
    **dict.fromkeys(("token", "opaque"), 0),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "s1": 1,
    "u1": 1,
    "s2": 2,
    "u2": 2,
    "c128": 128,
}


_EIGHT_BIT_FLOAT = re.compile(r"f8e\d+m\d+\w*")


_TORCH = re.compile(r"[/\\](torch|torch_xla)[/\\]")


_CALLS = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True)
class Array:
    """The shape of one array.

    Attributes:
        dtype: XLA's name of it, such as "bf16".
        dims: its sizes; the upper bounds of dynamic ones.
        order: the order of the dims in memory, fastest first ("minor to major").
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Size in bytes, without padding."""
        bits = 8 if _EIGHT_BIT_FLOAT.fullmatch(self.dtype) else BITS[self.dtype]
        return -(-self.num_elements * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Shape:
    """The shape of an instruction's result: an array, or a tuple of shapes.

    Attributes:
        array: the array; None for a tuple.
        parts: the elements of a tuple.
    """

    array: Array | None
    parts: tuple["Shape", ...] = ()

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays in it, from left to right."""
        return (self.array,) if self.array is not None else tuple(a for part in self.parts for a in part.arrays)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays in it."""
        return sum(array.num_bytes for array in self.arrays)

    def __str__(self) -> str:
        return str(self.array) if self.array is not None else f"({', '.join(map(str, self.parts))})"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: its name, unique within the module.
        shape: shape of its result.
        opcode: the opcode, such as "dot" or "all-reduce".
        operands: names of its operands; empty for a parameter or constant.
        literal: the number of a parameter or the value of a constant, else empty.
        attributes: attributes as text by key, such as `dimensions` -> "{1}"; without metadata.
        metadata: metadata as text by key: `op_name`, `op_type`, `source_file`, `source_line`.
        is_root: whether it is the computation's result.
    """

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    literal: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    is_root: bool = False

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it applies, calls or repeats."""
        texts = (self.attributes[key] for key in _CALLS if key in self.attributes)
        return tuple(name for text in texts for name in re.findall(r"%?([\w.\-]+)", text))

    @property
    def module_path(self) -> str:
        """See `nxd_state.neuron_errors.module_path`."""
        return module_path(self.metadata)

    @property
    def source(self) -> str:
        """`file:line` of the Python code that created it; empty if unknown."""
        return source_line(self.metadata)

    @property
    def place(self) -> str:
        """Its origin, the best known of: module path, source line outside torch, torch operation, own name."""
        line = "" if _TORCH.search(self.source) else self.source
        return self.module_path or line or self.metadata.get("op_type", "").replace("__", "::") or self.name


@dataclass(frozen=True)
class Computation:
    """A function of the module.

    Attributes:
        instructions: its instructions in the order of the text; each comes after its operands.
    """

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next((item for item in self.instructions if item.is_root), self.instructions[-1])

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}


@dataclass(frozen=True)
class HloModule:
    """A program for XLA's compilers, or one that they have compiled.

    Attributes:
        attributes: attributes of the header, such as `replica_count` or `input_output_alias`.
        computations: the computations by name.
        entry: name of the entry computation.
    """

    name: str
    attributes: dict[str, str]
    computations: dict[str, Computation]
    entry: str

    @property
    def main(self) -> Computation:
        """The entry computation."""
        return self.computations[self.entry]

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """The parameters of the entry computation, in the order of their numbers."""
        found = [item for item in self.main.instructions if item.opcode == "parameter"]
        return tuple(sorted(found, key=lambda item: int(item.literal)))

    def instructions(self) -> Iterator[Instruction]:
        """Yield the instructions of all computations."""
        for computation in self.computations.values():
            yield from computation.instructions


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
