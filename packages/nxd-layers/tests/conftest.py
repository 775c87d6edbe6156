"""What several test files need: jobs on a tensor-parallel mesh, logical tensors put together from the ranks' parts,
and a record of the operations that a function runs.
"""

import nxd_state
import pytest
import torch
from nxd_testing import collectives_of, operations_of, run_on_ranks, sent_dtypes_of

OVER_GLOO = {"NXD_SHM": "0"}  # collectives through shared memory are no operations of torch that could be counted


@pytest.fixture
def on_tp(request):
    """`on_tp(tp, fn, *args)`: what `fn(*args)` returns on each rank of a mesh of `tp` tensor-parallel ranks.

    Over gloo in tests that count operations.
    """
    counts_operations = not {"operations", "collectives", "sent_bytes", "sent_dtypes"}.isdisjoint(request.fixturenames)

    def run(tp, fn, *args, timeout=120):
        def job():
            nxd_state.initialize_model_parallel(tensor_model_parallel_size=tp)
            return fn(*args)

        return run_on_ranks(job, tp, timeout=timeout, env=OVER_GLOO if counts_operations else None)

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


def _own_rows(parameter, whole, dim):
    spec = nxd_state.get_shard_spec(parameter)
    if spec is None:
        return whole
    return torch.cat([whole.narrow(dim, p.logical.offset[0], p.logical.shape[0]) for p in spec.pieces], dim=dim)


@pytest.fixture
def own_rows():
    """`own_rows(parameter, whole, dim)`: the part of `whole`, along `dim`, that belongs to this rank's rows."""
    return _own_rows


def _summed_grad(parameter):
    if not parameter.sequence_parallel_enabled:
        return parameter.grad
    return nxd_state.all_reduce(parameter.grad, nxd_state.get_group("tp"))


@pytest.fixture
def summed_grad():
    """The gradient of a whole parameter as the optimizer will use it: partial ones are summed over the ranks."""
    return _summed_grad


def _assert_same(actual, expected, rtol=1e-10, atol=1e-12):
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=rtol, atol=atol)


@pytest.fixture
def assert_same():
    """Equal in shape, dtype and, to float64's precision, in numbers."""
    return _assert_same


@pytest.fixture
def operations():
    """`operations(fn)`: see `nxd_testing.operations_of`."""
    return operations_of


@pytest.fixture
def sent_dtypes():
    """`sent_dtypes(fn)`: the dtypes of all that `fn()` sends."""
    return sent_dtypes_of


@pytest.fixture
def collectives():
    """`collectives(fn)`: the collectives among `operations(fn)`."""
    return collectives_of
