"""Operations on tensors without memory: run once for each kind of inputs, with the same results ever after."""

import pytest
import torch
from nxd_plan.operations import OperationCache

aten = torch.ops.aten


def shaped(*sizes, dtype=torch.float32):
    return torch.empty(*sizes, dtype=dtype, device="meta")


def described(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (aten.mm.default, (shaped(3, 4), shaped(4, 5))),
        (aten.add.Tensor, (shaped(3, 4).t(), shaped(4, 3))),
        (aten.mul.Tensor, (shaped(3, dtype=torch.int64), 2)),
        (aten.mul.Tensor, (shaped(3, dtype=torch.int64), 2.0)),
        (aten.cat.default, ([shaped(2, 3), shaped(1, 3)],)),
        (aten.max.dim, (shaped(2, 3), 1)),
    ],
)
def test_what_is_known_already_looks_as_if_it_were_worked_out(func, arguments):
    cache = OperationCache()
    for first in (2, 2.0):  # which are equal, and give other types
        cache.of(aten.mul.Tensor)(shaped(3, dtype=torch.int64), first)
    worked_out, again = cache.of(func)(*arguments), cache.of(func)(*arguments)
    expected = func(*arguments)
    for found in (worked_out, again):
        pairs = zip(*((it,) if isinstance(it, torch.Tensor) else it for it in (found, expected)), strict=True)
        assert all(described(one) == described(other) for one, other in pairs)


def test_an_operation_is_run_once_for_inputs_of_a_kind(monkeypatch):
    cache, runs = OperationCache(), []

    class Counted:
        namespace, is_view, _schema = "aten", False, aten.neg.default._schema

        def __call__(self, tensor):
            runs.append(tensor.shape)
            return aten.neg.default(tensor)

    counted = Counted()
    made = [cache.of(counted)(shaped(*sizes)) for sizes in ((2, 3), (2, 3), (3, 2))]
    assert runs == [(2, 3), (3, 2)]
    assert made[0].untyped_storage()._cdata != made[1].untyped_storage()._cdata


@pytest.mark.parametrize("func", [aten.t.default, aten.detach.default, aten._unsafe_view.default, aten.zero_.default])
def test_results_that_share_memory_with_an_input_are_never_made_anew(func):
    cache = OperationCache()
    for _ in range(2):
        tensor = shaped(2, 3)
        result = cache.of(func)(tensor, *([[3, 2]] if func is aten._unsafe_view.default else []))
        assert result.untyped_storage()._cdata == tensor.untyped_storage()._cdata
