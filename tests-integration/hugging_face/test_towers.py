"""The towers of multimodal models: which modules they are, frozen, and left out of a model that sees text alone."""

import pytest
import torch
from hf_survey.architectures import tiny_config
from hf_survey.vision import VISION_FAMILIES, vision_config, vision_model
from nxd_layers.hf.towers import count_parameters, freeze, leave_out
from nxd_state import find_towers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

TOWERS = {
    "gemma3": ["model.vision_tower", "model.multi_modal_projector"],
    "qwen2_5_vl": ["model.visual"],
    "qwen3_vl": ["model.visual"],
    "qwen3_5": ["model.visual"],
    "mllama": ["model.vision_model", "model.multi_modal_projector"],
    "mistral3": ["model.vision_tower", "model.multi_modal_projector"],
    "llava_next": ["model.image_newline", "model.vision_tower", "model.multi_modal_projector"],
    "internvl": ["model.vision_tower", "model.multi_modal_projector"],
    "idefics3": ["model.vision_model", "model.connector"],
    "paligemma": ["model.vision_tower", "model.multi_modal_projector"],
    "glm4v": ["model.visual"],
    "aya_vision": ["model.vision_tower", "model.multi_modal_projector"],
    "cohere2_vision": ["model.vision_tower", "model.multi_modal_projector"],
    "granite4_vision": [
        *("model.image_newline", "model.vision_tower", "model.layerwise_projectors", "model.spatial_projectors")
    ],
}
SOME = ("gemma3", "mllama", "llava_next")


def some_quick(names):
    return [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in names]


def loss_and_gradients(model):
    ids = torch.arange(12).view(2, 6) + 40
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: it.grad for name, it in model.named_parameters() if it.grad is not None}


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_towers_are_all_modules_outside_of_the_language_model_and_its_head(family):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_config(family))

    assert find_towers(model) == TOWERS[family]


def test_a_model_of_text_alone_has_no_towers():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("gemma3_text"))

    assert find_towers(model) == []


@pytest.mark.parametrize("family", some_quick(VISION_FAMILIES))
def test_text_has_the_same_loss_and_gradients_with_towers_frozen_or_left_out(family):
    expected_loss, expected = loss_and_gradients(vision_model(family))
    frozen, without = vision_model(family), vision_model(family)
    paths = find_towers(frozen)

    freeze(frozen, paths)
    left_out = leave_out(without, paths)

    assert left_out == [path for path in paths if path != "model.image_newline"]
    for model in (frozen, without):
        loss, gradients = loss_and_gradients(model)
        assert torch.equal(loss, expected_loss)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(it, expected[name]) for name, it in gradients.items())
    trained = {name for name, it in frozen.named_parameters() if it.requires_grad}
    assert trained == {name for name, it in without.named_parameters() if it.requires_grad}
    assert count_parameters(frozen, paths) == sum(it.numel() for it in frozen.parameters() if not it.requires_grad)


def test_a_tower_that_was_left_out_raises_when_it_is_called():
    model = vision_model("gemma3")
    leave_out(model, find_towers(model))

    with pytest.raises(ValueError, match=r"model.vision_tower was left out .* text alone"):
        model(input_ids=torch.tensor([[5, 6]]), pixel_values=torch.zeros(1, 3, 32, 32, dtype=torch.float64))
