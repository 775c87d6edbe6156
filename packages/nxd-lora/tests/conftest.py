"""Jobs on tensor-parallel ranks; adapters with values that are not zero, the same at every layout; whole gradients."""

import nxd_state
import pytest
import torch
from nxd_lora import gather_adapter, load_adapter
from nxd_state import all_reduce, get_group
from nxd_testing import collectives_of, run_on_ranks


@pytest.fixture
def on_tp(request):
    """`on_tp(tp, fn, *args)`: what `fn(*args)` returns on each rank of a mesh of `tp` tensor-parallel ranks.

    Over gloo in tests that count operations.
    """
    counts_operations = "collectives" in request.fixturenames  # which shared memory has none of

    def run(tp, fn, *args, timeout=120):
        def job():
            nxd_state.initialize_model_parallel(tensor_model_parallel_size=tp)
            return fn(*args)

        return run_on_ranks(job, tp, timeout=timeout, env={"NXD_SHM": "0"} if counts_operations else None)

    return run


def _logical(parameter, tensor=None):
    tensor = parameter if tensor is None else tensor
    spec = nxd_state.get_shard_spec(parameter)
    if spec is None:
        return tensor.detach()
    group = nxd_state.get_group("tp")
    gathered = nxd_state.all_gather_object((spec, tensor.detach()), group)
    nxd_state.check_shard_specs([spec_of_rank for spec_of_rank, _ in gathered])
    (shape,) = {shape for spec_of_rank, _ in gathered for shape in spec_of_rank.logical_shapes.values()}
    whole = torch.full(shape, float("nan"), dtype=tensor.dtype)
    for spec_of_rank, part in gathered:
        spec_of_rank.copy_to_logical(part, whole)
    return whole


@pytest.fixture
def logical():
    """`logical(parameter)`, `logical(parameter, parameter.grad)`: the whole tensor, from the pieces on all ranks."""
    return _logical


def _assert_same(actual, expected, rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=rtol, atol=atol)


@pytest.fixture
def assert_same():
    """Equal in shape, dtype and, to float64's precision, in numbers."""
    return _assert_same


@pytest.fixture
def collectives():
    """`collectives(fn)`: names of the collectives that `fn()` runs."""
    return collectives_of


def _fill(model):
    generator = torch.Generator().manual_seed(5)
    whole = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        for name, tensor in sorted(gather_adapter(model).items())
    }
    load_adapter(model, whole)
    return whole


@pytest.fixture
def fill_adapter():
    """`fill_adapter(model)`: gives the adapter random values; returns them whole, by logical name."""
    return _fill


def _complete_grad(parameter):
    if getattr(parameter, "sequence_parallel_enabled", False):
        return all_reduce(parameter.grad, get_group("tp"))
    return parameter.grad


@pytest.fixture
def complete_grad():
    """`complete_grad(parameter)`: this rank's gradient; partial ones, which are marked, are summed over the ranks."""
    return _complete_grad
