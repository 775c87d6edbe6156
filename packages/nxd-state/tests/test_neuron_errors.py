import pytest
from nxd_state.neuron_errors import DeviceError, device_errors, explain_device_error
from nxd_state.xla_inspect import parse_hlo

# As neuronx-cc words it; the metadata is torch-xla's.
NOT_SUPPORTED = """RunNeuronCCImpl: [ERROR] [NCC_EVRF029] Operation sort is not supported on trn2.
  %sort.9 = f32[256]{0} sort(%reshape.37), dimensions={0}, is_stable=true, metadata={op_type="aten__sort" \
op_name="model.1/layers.0.2/experts.3/aten__sort" source_file="moe.py" source_line=71}"""
GRAPH = """HloModule step

ENTRY main {
  p = f32[64] parameter(0)
  b.1 = f32[64,64] broadcast(p), dimensions={0}
  sin.7 = f32[64,64] sine(b.1), metadata={op_type="aten__sin" op_name="head.4/aten__sin"}
  ROOT s = f32[64] slice(sin.7), slice={[0:1], [0:64]}
}
"""


def test_refused_operation_is_told_with_its_module_and_line():
    explained = explain_device_error(NOT_SUPPORTED)

    assert explained is not None
    first, *_, last = explained.splitlines()
    assert first == "the compiler refused the graph (NCC_EVRF029) in model.layers.0.experts (moe.py:71)"
    assert "Neuron Compiler Error Codes" in explained
    assert last in NOT_SUPPORTED


def test_instruction_that_is_only_named_is_looked_up_in_the_recorded_graph():
    message = "neuronx-cc failed: [NCC_EBVF030] too many instructions for %sin.7 and sin.7, not %cos.7"

    explained = explain_device_error(message, [parse_hlo(GRAPH)])

    assert explained is not None
    assert explained.startswith("the compiler refused the graph (NCC_EBVF030) in head\n")
    assert "also named" not in explained


def test_error_without_a_name_says_how_to_get_one():
    explained = explain_device_error("RunNeuronCCImpl: error condition error != 0: Command died")

    assert explained is not None
    assert "start_capture() at the program's beginning" in explained


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Out of memory allocating 36000 bytes.",
        'nrt_tensor_allocate status=4 message="Allocation Failure"',
        "Failure: NRT_RESOURCE in nrt_load()",
        "[NCC_EOOM001] The combined memory needed for the model's activation tensors exceeds the limit",
    ],
)
def test_lack_of_memory_is_told_with_what_the_recorded_graph_holds(message):
    explained = explain_device_error(message, [parse_hlo(GRAPH)])

    assert explained is not None
    assert explained.startswith("the device's memory does not suffice")
    assert (
        "needs at most 16,640 bytes, 256 of them arguments; beside those f32[64,64] of head (16,384 bytes)" in explained
    )
    assert "activation checkpointing" in explained
    assert explained.endswith(f"the message was: {message}")


def test_other_errors_pass_unchanged():
    assert explain_device_error("shape mismatch in matmul") is None
    with pytest.raises(RuntimeError, match=r"^shape mismatch$") as caught, device_errors():
        raise RuntimeError("shape mismatch")
    assert caught.type is RuntimeError


def test_device_errors_keep_their_cause():
    with pytest.raises(DeviceError, match=r"in model.layers.0.experts") as caught, device_errors():
        raise RuntimeError(NOT_SUPPORTED)

    assert isinstance(caught.value.__cause__, RuntimeError)
