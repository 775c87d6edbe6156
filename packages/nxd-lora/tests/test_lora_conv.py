"""Adapters on convolutions, beside PEFT's."""

import pytest
import torch
from nxd_lora import LoraConfig, LoraModel, load_peft_adapter, save_peft_adapter
from torch import nn


class Net(nn.Module):
    def __init__(self, dilation=(1, 2)):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, (3, 2), stride=2, padding=1, dilation=dilation, dtype=torch.float64)
        self.grouped = nn.Conv2d(4, 4, 1, groups=2)
        self.linear = nn.Linear(2, 2)

    def forward(self, images):
        return self.conv(images)


def make_model(targets="conv", **options):
    torch.manual_seed(3)
    return LoraModel(Net(**options), LoraConfig(lora_rank=2, lora_alpha=3, target_modules=[targets]))


def images():
    return torch.arange(2 * 3 * 8 * 9.0, dtype=torch.float64).view(2, 3, 8, 9).sin()


def test_branch_of_a_convolution_adds_nothing_at_first_and_trains_alone():
    model = make_model()
    torch.manual_seed(3)

    output = model(images())
    assert torch.equal(output, Net()(images()))
    output.sum().backward()

    trained = [name for name, parameter in model.module.named_parameters() if parameter.grad is not None]
    assert trained == ["conv.lora_A", "conv.lora_B"]


def test_merged_convolution_gives_the_numbers_of_its_branch(fill_adapter):
    model = make_model()
    plain = model(images())
    fill_adapter(model)
    before = model(images())
    assert not torch.allclose(before, plain)

    model.merge()

    torch.testing.assert_close(model(images()), before, rtol=1e-12, atol=1e-12)
    model.unmerge()
    assert torch.equal(model(images()), before)


def test_peft_computes_the_same_with_the_adapter_of_a_convolution(fill_adapter, tmp_path):
    peft = pytest.importorskip("peft")
    model = make_model(dilation=1)  # which PEFT leaves out of A
    fill_adapter(model)
    save_peft_adapter(model, tmp_path)

    torch.manual_seed(3)
    loaded = peft.PeftModel.from_pretrained(Net(dilation=1), tmp_path)
    again = make_model(dilation=1)
    load_peft_adapter(again, tmp_path)

    torch.testing.assert_close(loaded(images()), model(images()), rtol=1e-5, atol=1e-5)  # its factors are float32
    assert torch.equal(again(images()), model(images()))


def test_all_linear_leaves_convolutions_out_and_grouped_ones_are_refused():
    model = make_model("all-linear")

    assert [name for name, _ in model.module.named_parameters() if "lora" in name] == ["linear.lora_A", "linear.lora_B"]
    with pytest.raises(ValueError, match="groups=2 and padding_mode='zeros', but adapters support only groups=1"):
        make_model("grouped")
