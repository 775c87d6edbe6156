"""What several test files need: jobs on a tensor-parallel mesh, logical tensors put together from the ranks' parts,
and a record of the operations that a function runs.
"""

import nxd_state
import pytest
import torch
from nxd_testing import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    nxd_state.check_shard_specs(nxd_state.all_gather_object(spec, group))
    boxes = [(piece.logical, piece.logical_shape, tensor.detach()[piece.local.slices]) for piece in spec.pieces]
    gathered = [box for boxes_of_rank in nxd_state.all_gather_object(boxes, group) for box in boxes_of_rank]
    whole = torch.full(gathered[0][1], float("nan"), dtype=tensor.dtype)
    for box, _, part in gathered:
        whole[box.slices] = part
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


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.sent_dtypes = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        if func._schema.name.startswith("c10d::"):
            self.sent_dtypes |= {it.dtype for it in tree_leaves(args) if isinstance(it, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def _operations(fn):
    original = nxd_state.Pending.wait

    def wait(pending):
        recorder.names.append("wait")
        return original(pending)

    nxd_state.Pending.wait = wait
    try:
        with _Recorder() as recorder:
            fn()
    finally:
        nxd_state.Pending.wait = original
    return recorder.names


@pytest.fixture
def operations():
    """`operations(fn)`: names of the operations that `fn()` runs, in order, such as "aten::mm", "c10d::allreduce_",
    and "wait" where it waits for a collective.
    """
    return _operations


@pytest.fixture
def sent_dtypes():
    """`sent_dtypes(fn)`: the dtypes of all that `fn()` sends."""

    def dtypes(fn):
        with _Recorder() as recorder:
            fn()
        return recorder.sent_dtypes

    return dtypes


@pytest.fixture
def collectives():
    """`collectives(fn)`: the collectives among `operations(fn)`."""

    def names(fn):
        return [name for name in _operations(fn) if name.startswith("c10d::")]

    return names
