"""What would pass an adapter by, or break it, is refused."""

import json

import pytest
import torch
from nxd_layers import ColumnParallelLinear, linear_cross_entropy, pad_model
from nxd_lora import LoraConfig, LoraModel, read_peft_config, save_peft_adapter
from nxd_state import initialize_model_parallel
from torch import nn


def adapted():
    model = nn.Sequential(ColumnParallelLinear(4, 6, bias=False))
    return LoraModel(model, LoraConfig(lora_rank=2, target_modules=["0"]))


def test_chunked_loss_of_a_head_with_adapter_raises_until_it_is_merged(fill_adapter):
    model = adapted()
    fill_adapter(model)
    head, hidden, labels = model.module[0], torch.randn(3, 4), torch.tensor([0, 5, 2])

    with pytest.raises(ValueError, match="a LoRA adapter that is not merged, which linear_cross_entropy"):
        linear_cross_entropy(hidden, head, labels)
    unmerged = nn.functional.cross_entropy(head(hidden), labels)
    model.merge()
    merged = linear_cross_entropy(hidden, head, labels)

    torch.testing.assert_close(merged, unmerged)


@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_adapter_of_a_weight_that_other_parameters_make_is_refused_by_name(normed):
    model = nn.ModuleDict({"up": normed(nn.Linear(4, 6)), "down": nn.Linear(6, 4)})

    with pytest.raises(
        ValueError, match=r"names up, a ParametrizedLinear, whose weight is computed .* remove that first"
    ):
        LoraModel(model, LoraConfig(lora_rank=2, target_modules=["up"]))
    LoraModel(model, LoraConfig(lora_rank=2, target_modules=["down"]))


def test_pad_model_of_a_layer_with_adapter_raises(run_ranks):
    def pad():
        initialize_model_parallel(tensor_model_parallel_size=2)
        with pytest.raises(ValueError, match="pad the model before wrapping it"):
            pad_model(adapted().module, 2, 3)

    run_ranks(pad, 2)


@pytest.mark.parametrize("text", ["", "0", "[]", '"a"', "[" * 100_000, "\0", '{"peft_type": "LORA"}', '{"r": 8}'])
def test_adapter_config_of_a_stranger_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)

    with pytest.raises(ValueError, match=r"adapter_config\.json|not the config of a LoRA adapter") as raised:
        read_peft_config(tmp_path)

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"r": 10**12},
            r"0\.lora_A has shape \[2, 4\], which does not match r=1000000000000; .*use the config",
        ),
        ({"r": 1}, "which does not match r=1"),
        ({"use_dora": True}, "it has no lora_magnitude_vector, but use_dora=True"),
        ({"target_modules": ["1"]}, "it has factors for 0, which target_modules does not name"),
    ],
)
def test_adapter_config_that_contradicts_its_tensors_is_refused(tmp_path, change, message):
    save_peft_adapter(adapted(), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(ValueError, match=message):
        read_peft_config(tmp_path)
