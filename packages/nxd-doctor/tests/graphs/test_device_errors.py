"""Errors of a device are explained by the graphs that were recorded before them."""

from nxd_doctor.graphs import parse_hlo
from nxd_doctor.graphs.capture import DumpedGraphs
from nxd_state.neuron_errors import explain_device_error

GRAPH = """HloModule step

ENTRY main {
  p = f32[64] parameter(0)
  b.1 = f32[64,64] broadcast(p), dimensions={0}
  sin.7 = f32[64,64] sine(b.1), metadata={op_type="aten__sin" op_name="head.4/aten__sin"}
  ROOT s = f32[64] slice(sin.7), slice={[0:1], [0:64]}
}
"""


RECORDED = DumpedGraphs(lambda: [parse_hlo(GRAPH)])


def test_instruction_that_is_only_named_is_looked_up_in_the_recorded_graph():
    message = "neuronx-cc failed: [NCC_EBVF030] too many instructions for %sin.7 and sin.7, not %cos.7"

    explained = explain_device_error(message, RECORDED)

    assert explained is not None
    assert explained.startswith("the compiler refused the graph (NCC_EBVF030) in head\n")
    assert "also named" not in explained


def test_lack_of_memory_is_told_with_what_the_recorded_graph_holds():
    explained = explain_device_error("RESOURCE_EXHAUSTED: Out of memory allocating 36000 bytes.", RECORDED)

    assert explained is not None
    assert (
        "needs at most 16,640 bytes, 256 of them arguments; the largest others are f32[64,64] of head (16,384 bytes)"
        in explained
    )
