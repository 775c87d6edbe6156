import pytest
from nxd_state.neuron_errors import DeviceError, device_errors, explain_device_error

# As neuronx-cc words it; the metadata is torch-xla's.
NOT_SUPPORTED = """RunNeuronCCImpl: [ERROR] [NCC_EVRF029] Operation sort is not supported on trn2.
  %sort.9 = f32[256]{0} sort(%reshape.37), dimensions={0}, is_stable=true, metadata={op_type="aten__sort" \
op_name="model.1/layers.0.2/experts.3/aten__sort" source_file="moe.py" source_line=71}"""


def test_refused_operation_is_told_with_its_module_and_line():
    explained = explain_device_error(NOT_SUPPORTED)

    assert explained is not None
    first, *_, last = explained.splitlines()
    assert first == "the compiler refused the graph (NCC_EVRF029) in model.layers.0.experts (moe.py:71)"
    assert "Neuron Compiler Error Codes" in explained
    assert last in NOT_SUPPORTED


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
def test_lack_of_memory_is_told_with_what_saves_memory(message):
    explained = explain_device_error(message)

    assert explained is not None
    assert explained.startswith("the device ran out of memory")
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
