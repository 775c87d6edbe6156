import torch
from nxd_state import allocate_meta_tensor, seed_of_module
from torch import nn


def test_parameter_gets_memory_and_stays_the_same_object_with_its_attributes():
    layer = nn.Linear(3, 2, dtype=torch.bfloat16, device="meta")
    weight, bias = layer.weight, layer.bias
    weight.mark = "kept"
    bias.requires_grad_(False)

    allocate_meta_tensor(weight)
    allocate_meta_tensor(bias)

    assert layer.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.device.type, weight.shape, weight.dtype, weight.mark) == ("cpu", (2, 3), torch.bfloat16, "kept")
    assert (weight.requires_grad, bias.requires_grad) == (True, False)


def test_what_nobody_sets_is_nan_and_integers_are_zero():
    values, positions = torch.empty(4, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")

    allocate_meta_tensor(values)
    allocate_meta_tensor(positions)

    assert values.isnan().all()
    assert torch.equal(positions, torch.zeros(4, dtype=torch.int64))


def test_seeds_of_modules_depend_on_the_seed_and_the_name_only():
    seeds = [seed_of_module(seed, name) for seed in (0, 1) for name in ("layers.0", "layers.1")]

    assert len(set(seeds)) == 4
    assert seeds == [seed_of_module(seed, name) for seed in (0, 1) for name in ("layers.0", "layers.1")]
    assert all(0 <= seed < 2**63 for seed in seeds)
