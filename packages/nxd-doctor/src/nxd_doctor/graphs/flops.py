"""Counts the FLOPs of a graph: the multiplications and additions of its matrix products and convolutions.

Everything else (elementwise functions, reductions) is left out, as is usual when a step's FLOPs are compared with a
device's peak. A multiply-add counts as two.
"""

import math
from dataclasses import dataclass

from nxd_doctor.graphs.hlo import Computation, HloModule, Instruction
from nxd_doctor.graphs.parse import integers
from nxd_doctor.graphs.repeats import count_runs


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
