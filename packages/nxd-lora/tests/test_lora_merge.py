"""Merging: the numbers stay, and every bit comes back."""

import pytest
import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_layers.quantization import convert
from nxd_lora import LoraConfig, LoraModel
from torch import nn

TARGETS = ["0", "1", "2"]


def make_model(dtype=torch.float64, stride=1, targets=TARGETS):
    torch.manual_seed(2)
    layers = [
        ParallelEmbedding(13, 6, dtype=dtype, pad=True),
        ColumnParallelLinear(6, 24, gather_output=stride > 1, dtype=dtype, stride=stride),
        RowParallelLinear(24, 5, input_is_parallel=stride == 1, dtype=dtype),
    ]
    return LoraModel(nn.Sequential(*layers), LoraConfig(lora_rank=2, lora_alpha=3, target_modules=list(targets)))


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_merged_model_gives_the_numbers_of_the_unmerged_one(on_tp, fill_adapter, assert_same, tp, stride):
    def job():
        model, ids = make_model(stride=stride), torch.arange(13)
        plain = model(ids)
        fill_adapter(model)
        before = model(ids)
        assert not torch.allclose(before, plain)

        model.merge()
        assert_same(model(ids), before, rtol=1e-12)
        model.merge()  # once more changes nothing
        assert_same(model(ids), before, rtol=1e-12)

    on_tp(tp, job)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_unmerge_restores_every_bit(on_tp, fill_adapter, dtype):
    def job():
        model, ids = make_model(dtype), torch.arange(13)
        fill_adapter(model)
        weights = [parameter.clone() for parameter in model.parameters()]
        output = model(ids)

        model.merge()
        assert model.is_merged
        assert not torch.equal(model.module[1].weight, weights[4])
        model.unmerge()

        assert not model.is_merged
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            assert torch.equal(parameter, weight)
        assert torch.equal(model(ids), output)

    on_tp(2, job)


def test_merge_in_bfloat16_rounds_once(fill_adapter):
    model = LoraModel(
        nn.Sequential(nn.Linear(6, 5, dtype=torch.bfloat16)), LoraConfig(lora_rank=4, target_modules=["0"])
    )
    fill_adapter(model)
    layer = model.module[0]
    exact = layer.weight.double() + 2.0 * layer.lora_B.double() @ layer.lora_A.double()

    model.merge()

    assert torch.equal(layer.weight, exact.to(torch.bfloat16))


@pytest.mark.parametrize("tp", [1, 2])
def test_merge_and_unload_gives_the_plain_model_that_trains_as_before(on_tp, fill_adapter, assert_same, tp):
    def job():
        module = make_model().unload()
        module[0].weight.requires_grad_(False)
        names = [name for name, _ in module.named_parameters()]
        model = LoraModel(module, LoraConfig(lora_rank=2, target_modules=TARGETS))
        fill_adapter(model)
        before = model(torch.arange(13))

        merged = model.merge_and_unload()

        assert merged is module
        assert [name for name, _ in merged.named_parameters()] == names
        assert [parameter.requires_grad for parameter in merged.parameters()] == [False] + [True] * 4
        assert_same(merged(torch.arange(13)), before, rtol=1e-12)

    on_tp(tp, job)


def test_unload_gives_the_model_as_it_was(fill_adapter):
    module = nn.Sequential(nn.Linear(4, 3))
    weight, output = module[0].weight.clone(), module(torch.ones(4))
    model = LoraModel(module, LoraConfig(target_modules=["0"]))
    fill_adapter(model)
    model.merge()

    assert model.unload() is module
    assert torch.equal(module[0].weight, weight)
    assert torch.equal(module(torch.ones(4)), output)


def test_merge_into_a_tied_weight_is_refused_and_changes_nothing(fill_adapter):
    module = nn.ModuleDict({"table": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False), "other": nn.Linear(2, 2)})
    module["head"].weight = module["table"].weight
    model = LoraModel(module, LoraConfig(target_modules=["other", "head"]))
    fill_adapter(model)
    before = [parameter.clone() for parameter in model.parameters()]

    with pytest.raises(ValueError, match=r"table\.weight and head\.weight are one tied weight.*Untie them"):
        model.merge()

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not model.is_merged


def test_unmerge_of_a_layer_that_was_quantized_is_refused(fill_adapter):
    model = LoraModel(nn.Sequential(ColumnParallelLinear(8, 8)), LoraConfig(target_modules=["0"]))
    fill_adapter(model)
    model.merge()
    quantized = convert(model)
    values = quantized.module[0].weight.clone()

    with pytest.raises(ValueError, match="0 was quantized with its adapter merged, which cannot be undone"):
        quantized.unmerge()

    assert torch.equal(quantized.module[0].weight, values)
    model.unmerge()
