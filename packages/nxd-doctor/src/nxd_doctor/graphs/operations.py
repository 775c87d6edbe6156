"""Finds the matrix products of a graph, counts their FLOPs, and finds dtype conversions.

Only matrix products and convolutions count as FLOPs, as is usual when a step is compared with a device's peak; a
multiply-add counts as two. A conversion shows where precision is lost, and where copies take memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nxd_doctor.graphs.hlo import Computation, HloModule, Instruction, count_runs
from nxd_doctor.graphs.parse import integers


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
