"""Inspects the graphs that a training step hands to an XLA compiler, without a device.

The counting works on HLO text, whatever made it. Only recording the graphs of a step needs torch-xla.
"""

from nxd_state.xla_inspect.capture import capture_steps, graphs_of, recent_graphs, start_capture
from nxd_state.xla_inspect.casts import Cast, find_casts
from nxd_state.xla_inspect.collectives import Collective, find_collectives, total_bytes
from nxd_state.xla_inspect.compare import Difference, first_difference
from nxd_state.xla_inspect.counters import Counters, read_counters
from nxd_state.xla_inspect.flops import Product, count_flops, find_products
from nxd_state.xla_inspect.graph_dump import CapturedGraph, read_graphs
from nxd_state.xla_inspect.hlo import Array, Computation, HloModule, Instruction, Shape
from nxd_state.xla_inspect.liveness import LiveBuffer, Memory, peak_memory
from nxd_state.xla_inspect.parse import parse_hlo
from nxd_state.xla_inspect.repeats import loops_counted_once
from nxd_state.xla_inspect.scopes import module_scopes

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
    "Difference",
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
