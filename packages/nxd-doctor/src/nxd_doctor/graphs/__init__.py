"""Inspects the graphs that a training step passes to an XLA compiler, without a device.

Counting works on HLO text from any source. Only recording the graphs of a step needs torch-xla.
"""

from nxd_doctor.graphs.capture import (
    CapturedGraph,
    Counters,
    capture_steps,
    graphs_of,
    read_counters,
    read_graphs,
    recent_graphs,
    start_capture,
)
from nxd_doctor.graphs.compare import GraphDifference, first_difference
from nxd_doctor.graphs.hlo import Array, Computation, HloModule, Instruction, Shape, loops_counted_once
from nxd_doctor.graphs.liveness import LiveBuffer, Memory, peak_memory
from nxd_doctor.graphs.operations import (
    Cast,
    Collective,
    Product,
    count_flops,
    find_casts,
    find_collectives,
    find_products,
    total_bytes,
)
from nxd_doctor.graphs.parse import parse_hlo
from nxd_doctor.graphs.scopes import module_scopes

__all__ = [
    "parse_hlo",
    "HloModule",
    "Computation",
    "Instruction",
    "Shape",
    "Array",
    "find_collectives",
    "Collective",
    "total_bytes",
    "find_products",
    "Product",
    "count_flops",
    "peak_memory",
    "Memory",
    "LiveBuffer",
    "find_casts",
    "Cast",
    "loops_counted_once",
    "first_difference",
    "GraphDifference",
    # recording; these need torch-xla
    "start_capture",
    "capture_steps",
    "graphs_of",
    "recent_graphs",
    "CapturedGraph",
    "read_graphs",
    "module_scopes",
    "Counters",
    "read_counters",
]
