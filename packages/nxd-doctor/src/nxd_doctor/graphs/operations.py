"""Finds the operations of a graph that cost most: collectives, matrix products, and dtype conversions.

Bytes of collectives are those of ring algorithms, the minimum for any algorithm if all ranks have the same link. With n
ranks in a group, an all-gather with a result of S bytes and a reduce-scatter or all-to-all with an input of S bytes
send S (n-1)/n, an all-reduce twice that (a reduce-scatter and an all-gather), a permute or broadcast S. A scalar next
to arrays is not counted: torch-xla adds one to keep its collectives in order.

Only matrix products and convolutions count as FLOPs, as is usual when a step is compared with a device's peak; a
multiply-add counts as two. A conversion shows where precision is lost, and where copies take memory.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from nxd_doctor.graphs.hlo import Computation, HloModule, Instruction, count_runs
from nxd_doctor.graphs.parse import integer_lists, integers

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True)
class Collective:
    """One collective of a graph.

    Attributes:
        kind: XLA's opcode, without the "-start" of an asynchronous one.
        name: name of its instruction.
        dtype: XLA's name of the dtype; several are joined by "+".
        shapes: shapes of its inputs, such as "f32[8,16]".
        groups: groups of ranks that exchange; for a permute, pairs (from, to).
        bytes_sent: bytes sent in one run by the rank that sends most.
        runs: number of runs per step.
        place: its origin, as in `Instruction.place`.
    """

    kind: str
    name: str
    dtype: str
    shapes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    bytes_sent: int
    runs: int
    place: str

    @property
    def group_size(self) -> int:
        """Number of ranks in the largest group; 2 for a permute."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def step_bytes(self) -> int:
        """Bytes that a rank sends for it in a step."""
        return self.bytes_sent * self.runs


def find_collectives(module: HloModule, *, world_size: int | None = None) -> list[Collective]:
    """Find all collectives that a step runs, in the order of the text.

    Args:
        module: a graph, before or after compilation.
        world_size: number of ranks in the job; the header's `replica_count` times `num_partitions` if None. Needed
            only if a collective names no groups, which means all ranks.

    Raises:
        ValueError: there is a collective over all ranks, and their number is unknown.
    """
    runs = count_runs(module)
    found = []
    for name, computation in module.computations.items():
        if not runs[name]:
            continue
        operands = computation.by_name
        for instruction in computation.instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind in KINDS:
                inputs = [operands[operand] for operand in instruction.operands]
                groups = _groups(instruction, kind, world_size or _header_world_size(module))
                found.append(_collective(instruction, kind, inputs, groups, runs[name]))
    return found


def total_bytes(collectives: Iterable[Collective]) -> dict[str, int]:
    """Bytes that a rank sends in a step, by kind."""
    totals: dict[str, int] = {}
    for collective in collectives:
        totals[collective.kind] = totals.get(collective.kind, 0) + collective.step_bytes
    return totals


def replica_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse groups of ranks from any form of `replica_groups`: "{{0,1},{2,3}}", "[2,2]<=[4]", "[2,2]<=[2,2]T(1,0)"."""
    iota = _IOTA.match(text)
    if iota is None:
        return tuple(group for group in integer_lists(text) if group)
    count, size = integers(iota[1])[0], math.prod(integers(iota[1])[1:])
    ranks = _transposed(integers(iota[2]), integers(iota[3]) if iota[3] else None)
    return tuple(tuple(ranks[size * index : size * (index + 1)]) for index in range(count))


def _collective(
    instruction: Instruction, kind: str, inputs: list[Instruction], groups: tuple[tuple[int, ...], ...], runs: int
) -> Collective:
    arrays = [array for operand in inputs for array in operand.shape.arrays]
    arrays = [array for array in arrays if array.dims] or arrays
    input_bytes = sum(array.num_bytes for array in arrays)
    largest = max((len(group) for group in groups), default=1)
    return Collective(
        kind=kind,
        name=instruction.name,
        dtype="+".join(dict.fromkeys(array.dtype for array in arrays)),
        shapes=tuple(map(str, arrays)),
        groups=groups,
        bytes_sent=_bytes_sent(kind, input_bytes, largest, groups),
        runs=runs,
        place=instruction.place,
    )


def _bytes_sent(kind: str, input_bytes: int, size: int, groups: tuple[tuple[int, ...], ...]) -> int:
    share = Fraction(size - 1, size)
    if kind == "all-gather":  # the input is one rank's part of the result
        return input_bytes * (size - 1)
    if kind == "all-reduce":
        return math.ceil(2 * input_bytes * share)
    if kind == "collective-permute":
        sends = [source for source, target in groups if source != target]
        return input_bytes * max((sends.count(rank) for rank in sends), default=0)
    if kind == "collective-broadcast":
        return input_bytes if size > 1 else 0
    return math.ceil(input_bytes * share)


def _groups(instruction: Instruction, kind: str, world_size: int | None) -> tuple[tuple[int, ...], ...]:
    if kind == "collective-permute":
        return integer_lists(instruction.attributes.get("source_target_pairs", ""))
    groups = replica_groups(instruction.attributes.get("replica_groups", ""))
    if not groups and world_size is None:
        raise ValueError(f"{instruction.name} is over all ranks, but the graph does not say how many; pass world_size")
    return groups or (tuple(range(world_size or 1)),)


def _header_world_size(module: HloModule) -> int | None:
    counts = [module.attributes.get(key) for key in ("replica_count", "num_partitions")]
    return math.prod(int(count) for count in counts if count) if any(counts) else None


def _transposed(dims: tuple[int, ...], order: tuple[int, ...] | None) -> list[int]:
    """0, 1, 2, ... laid out row-major over `dims`, then read with the dims in another order."""
    order = order or tuple(range(len(dims)))
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    ranks = [0]
    for axis in order:
        ranks = [rank + index * strides[axis] for rank in ranks for index in range(dims[axis])]
    return ranks


@dataclass(frozen=True)
class Product:
    """One dot or convolution.

    Attributes:
        name: name of its instruction.
        dtype: dtype of its first input.
        flops: FLOPs of one run.
        runs: number of runs per step.
        place: its origin, as in `Instruction.place`.
    """

    name: str
    dtype: str
    flops: int
    runs: int
    place: str


def find_products(module: HloModule) -> list[Product]:
    """Find all dots and convolutions that a step runs, in the order of the text."""
    runs = count_runs(module)
    return [
        Product(item.name, _dtype(item, computation), _flops(item, computation), runs[name], item.place)
        for name, computation in module.computations.items()
        if runs[name]
        for item in computation.instructions
        if item.opcode in ("dot", "convolution")
    ]


def count_flops(module: HloModule) -> int:
    """Floating-point operations of one step on one rank, including those on a convolution's padding."""
    return sum(product.flops * product.runs for product in find_products(module))


def _flops(item: Instruction, computation: Computation) -> int:
    operands = computation.by_name
    left, right = (operands[name].shape.arrays[0].dims for name in item.operands[:2])
    num_results = item.shape.arrays[0].num_elements
    if item.opcode == "dot":
        contracted = integers(item.attributes.get("lhs_contracting_dims", ""))
        return 2 * num_results * math.prod(left[dim] for dim in contracted)
    kernel_labels = item.attributes["dim_labels"].split("_")[1].split("->")[0]
    return 2 * num_results * math.prod(right) // right[kernel_labels.index("o")]


def _dtype(item: Instruction, computation: Computation) -> str:
    return computation.by_name[item.operands[0]].shape.arrays[0].dtype


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
