"""Dropout of the branch: on its input only, with the masks of one process at every layout."""

import pytest
import torch
from nxd_layers import ColumnParallelLinear, RowParallelLinear
from nxd_layers import scatter_to_sequence_parallel_region as to_sequence
from nxd_lora import LoraConfig, LoraModel
from nxd_state import all_gather, get_group
from torch import nn


def run_block(fill_adapter, sequence_parallel):
    """Output and gradient of a column and a row layer with dropout, whole."""
    torch.manual_seed(0)
    up = ColumnParallelLinear(6, 8, True, False, sequence_parallel, torch.float64)
    down = RowParallelLinear(8, 6, True, True, sequence_parallel, torch.float64)
    model = LoraModel(nn.Sequential(up, down), LoraConfig(lora_rank=2, lora_dropout=0.5, target_modules=["0", "1"]))
    fill_adapter(model)
    whole = torch.randn(4, 3, 6, dtype=torch.float64)
    input_ = (to_sequence(whole) if sequence_parallel else whole).requires_grad_()
    torch.manual_seed(1)
    output = model(input_)
    output.square().sum().backward()
    results = [output.detach(), input_.grad]
    return [all_gather(part, get_group("tp")) for part in results] if sequence_parallel else results


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_dropout_drops_the_elements_that_one_process_drops(on_tp, fill_adapter, assert_same, tp, sequence_parallel):
    alone = on_tp(1, run_block, fill_adapter, False)[0]

    for results in on_tp(tp, run_block, fill_adapter, sequence_parallel):
        for part, expected in zip(results, alone, strict=True):
            assert_same(part, expected)


def test_dropout_scales_what_it_keeps_and_leaves_the_layer_itself_alone():
    model = LoraModel(nn.Sequential(nn.Linear(1000, 1)), LoraConfig(lora_dropout=0.25, target_modules=["0"]))
    layer = model.module[0]
    nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    nn.init.ones_(layer.lora_A), nn.init.ones_(layer.lora_B)
    layer.lora.scale = 1 / 16
    torch.manual_seed(0)

    kept = model(torch.ones(1000)).item() * 0.75

    assert kept == pytest.approx(750, abs=60)
    assert kept == pytest.approx(round(kept), abs=1e-2)
    assert model.eval()(torch.ones(1000)).item() == pytest.approx(1000)
