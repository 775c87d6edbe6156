"""Outputs may be changed in place, as models of others do (`clamp_` of queries): no view that autograd refuses."""

import pytest
import torch
from nxd_layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RMSNorm,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.quantization import convert

LAYERS = {
    "column": lambda: ColumnParallelLinear(4, 8, gather_output=False),
    "column gathered": lambda: ColumnParallelLinear(4, 8),
    "column of sequence": lambda: ColumnParallelLinear(4, 8, gather_output=False, sequence_parallel_enabled=True),
    "fused column gathered": lambda: ColumnParallelLinear(4, 8, stride=2),
    "row": lambda: RowParallelLinear(4, 8),
    "row without bias": lambda: RowParallelLinear(4, 8, bias=False),
    "row to sequence": lambda: RowParallelLinear(
        4, 8, input_is_parallel=True, sequence_parallel_enabled=True, bias=False
    ),
    "qkv": lambda: GQAQKVColumnParallelLinear(4, [8, 4]),
    "qkv in parts": lambda: GQAQKVColumnParallelLinear(4, [8, 4], gather_output=False),
    "three in parts": lambda: GQAQKVColumnParallelLinear(4, [8, 4], gather_output=False, fuse_qkv=False),
    "quantized": lambda: convert(ColumnParallelLinear(4, 8)),
    "norm": lambda: RMSNorm(4),
    "gathered": lambda: gather_from_tensor_model_parallel_region,
    "sequence gathered": lambda: gather_from_sequence_parallel_region,
    "summed": lambda: reduce_from_tensor_model_parallel_region,
    "sequence summed": lambda: reduce_scatter_to_sequence_parallel_region,
    "scattered": lambda: scatter_to_tensor_model_parallel_region,
    "sequence scattered": lambda: scatter_to_sequence_parallel_region,
}


def grads(make, *, in_place):
    torch.manual_seed(0)
    layer = make()
    given = torch.randn(4, 2, 4)
    if getattr(layer, "input_is_parallel", False):
        given = scatter_to_tensor_model_parallel_region(given).detach()
    given = given.requires_grad_()
    outputs = layer(given.clone())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    changed = [output.mul_(3) if in_place else output * 3 for output in outputs]
    total = sum(output.square().sum() for output in changed)
    total.backward()
    return total.detach(), given.grad


def changed_in_place():
    failed = []
    for name, make in LAYERS.items():
        expected = grads(make, in_place=False)
        try:
            found = grads(make, in_place=True)
        except RuntimeError as error:
            failed.append(f"{name}: {error}")
        else:
            torch.testing.assert_close(found, expected, msg=name)
    return failed


@pytest.mark.parametrize("tp", [1, 2])
def test_output_changed_in_place_equals_a_changed_copy(on_tp, tp):
    assert on_tp(tp, changed_in_place) == [[]] * tp


@pytest.mark.parametrize("tp", [1, 2])
def test_vectors_of_a_table_are_changed_in_place(on_tp, tp):
    def job():
        for across in (False, True):
            table = ParallelEmbedding(8, 4, shard_across_embedding=across)
            table(torch.tensor([[1, 2], [7, 0]])).mul_(2.0).sum().backward()
            assert table.weight.grad is not None

    on_tp(tp, job)
