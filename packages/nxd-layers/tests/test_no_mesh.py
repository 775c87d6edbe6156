"""Without an initialised mesh the layers are torch's own, and need no process group."""

import pytest
import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_cross_entropy
from nxd_state import get_shard_spec
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (ColumnParallelLinear, {}),
        (ColumnParallelLinear, {"gather_output": False, "stride": 3}),
        (ColumnParallelLinear, {"sequence_parallel_enabled": True, "sequence_dimension": 1}),
        (RowParallelLinear, {}),
        (RowParallelLinear, {"input_is_parallel": True, "sequence_parallel_enabled": True}),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_without_a_mesh_is_torchs(kind, arguments, bias):
    torch.manual_seed(0)
    expected = nn.Linear(6, 9, bias)
    torch.manual_seed(0)
    layer = kind(6, 9, bias, **arguments)
    input_, expected_input = (torch.arange(36.0).view(3, 2, 6).requires_grad_() for _ in range(2))

    output, wanted = layer(input_), expected(expected_input)
    output.square().sum().backward()
    wanted.square().sum().backward()

    assert torch.equal(output, wanted)
    assert torch.equal(input_.grad, expected_input.grad)
    assert layer.state_dict().keys() == expected.state_dict().keys()
    for parameter, other in zip(layer.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert torch.equal(parameter.grad, other.grad)
        assert get_shard_spec(parameter) is None


@pytest.mark.parametrize(
    "arguments",
    [{}, {"shard_across_embedding": True}, {"pad": True}, {"sequence_parallel_enabled": True, "sequence_dimension": 0}],
)
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding_without_a_mesh_is_torchs(arguments, padding_idx):
    torch.manual_seed(0)
    expected = nn.Embedding(7, 5, padding_idx)
    torch.manual_seed(0)
    layer = ParallelEmbedding(7, 5, padding_idx=padding_idx, **arguments)
    ids = torch.tensor([[0, 2], [6, 6]])

    output, wanted = layer(ids), expected(ids)
    output.sum().backward()
    wanted.sum().backward()

    assert layer.padding_idx == expected.padding_idx
    assert torch.equal(output, wanted)
    assert torch.equal(layer.weight, expected.weight)
    assert torch.equal(layer.weight.grad, expected.weight.grad)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_without_a_mesh_is_torchs(label_smoothing):
    logits, labels = torch.randn(3, 7), torch.tensor([0, -100, 6])
    loss = parallel_cross_entropy(logits, labels, label_smoothing)
    assert torch.equal(loss, F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing))
