"""`tile_modules`: the numbers without tiles, and the memory of one tile."""

import pytest
import torch
from nxd_layers import ColumnParallelLinear, RowParallelLinear
from nxd_layers.activation_checkpoint import tile_modules
from nxd_state import initialize_model_parallel
from torch import nn
from torch.nn import functional as F


class Wide(nn.Module):
    def __init__(self, sequence_parallel=False):
        super().__init__()
        options = {"dtype": torch.float64, "sequence_parallel_enabled": sequence_parallel, "bias": False}
        self.up = ColumnParallelLinear(8, 64, gather_output=False, **options)
        self.down = RowParallelLinear(64, 8, input_is_parallel=True, **options)

    def forward(self, hidden):
        return self.down(F.silu(self.up(hidden)))


def step(num_tiles, length=11, *, sequence_parallel=False):
    """Output, gradients and the bytes kept for backward."""
    torch.manual_seed(0)
    model = nn.Sequential(Wide(sequence_parallel))
    hidden = torch.randn(length, 2, 8, dtype=torch.float64, requires_grad=True)
    if num_tiles:
        assert tile_modules(model, Wide, num_tiles=num_tiles, sequence_dim=0) == ["0"]
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(hidden)
    output.square().sum().backward()
    return output.detach(), [hidden.grad, *(p.grad for p in model.parameters())], sum(kept.values())


@pytest.mark.parametrize("num_tiles", [1, 3, 50])
def test_tiles_give_the_numbers_of_the_whole_and_keep_less(num_tiles):
    expected, gradients, whole = step(0)
    output, found, kept = step(num_tiles)

    torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-12)
    assert kept < whole / 2


def step_on_ranks():
    initialize_model_parallel(2)
    for sequence_parallel in (False, True):
        expected = step(0, sequence_parallel=sequence_parallel)
        torch.testing.assert_close(step(4, sequence_parallel=sequence_parallel)[:2], expected[:2])


def test_tiles_of_parallel_layers_give_the_numbers_of_the_whole(run_ranks):
    run_ranks(step_on_ranks, 2)


def test_tiles_of_nothing_are_refused():
    with pytest.raises(ValueError, match="num_tiles=0 must be at least 1"):
        tile_modules(nn.Linear(1, 1), nn.Linear, num_tiles=0)
    with pytest.raises(ValueError, match="NoSuchMLP"):
        tile_modules(nn.Sequential(nn.Linear(1, 1)), "NoSuchMLP", num_tiles=2)
