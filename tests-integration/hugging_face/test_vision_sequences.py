"""Small vision-language models whose sequences are split over ranks: the loss and gradients of one process."""

from dataclasses import replace

import pytest
import torch
from hf_survey.comparison import TEXT_ALONE, Layout, one_process
from hf_survey.survey import judge
from nxd_layers.hf import parallelize
from nxd_parity import InFloat64
from nxd_state import all_reduce, get_group, initialize_model_parallel

pytest.importorskip("torchvision", reason="processors of images need it: pip install torchvision")

from hf_survey.vision import VISION_FAMILIES, vision_model, vision_processor
from hf_survey.vision_batch import picture, vision_inputs

TENSOR, CONTEXT = Layout(tp=2, sp=True), Layout(cp=2)
BOTH = Layout(tp=2, cp=2, sp=True)
CLOSE = {"rtol": 1e-10, "atol": 1e-13}
OF_ROPE = ("mm_token_type_ids", "image_grid_thw", "attention_mask")
QUICK = ["gemma3", "qwen3_vl", "mllama"]  # masks with blocks, features between layers, cross-attention


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows", ["with images", "text alone"])
@pytest.mark.parametrize("layout", [TENSOR, CONTEXT, BOTH], ids=str)
@pytest.mark.parametrize(
    "family", [pytest.param(it, marks=() if it in QUICK else pytest.mark.slow) for it in VISION_FAMILIES]
)
def test_sequences_of_a_vision_language_model_over_ranks_give_the_numbers_of_one_process(
    run_ranks, family, layout, rows
):
    named = family if rows == "with images" else f"{family}{TEXT_ALONE}"
    if family == "qwen3_5":  # layers that pass a state along the sequence need full sequences on each of both
        layout = replace(layout, sp=layout.sp and layout.cp == 1)
    expected = one_process(named)

    verdict = judge(run_ranks, named, layout, expected, 120.0)

    assert (verdict.outcome, verdict.reason) == ("pass", "")


def packed(family):
    """A row of three conversations, one after the other, and its positions as transformers makes them for each."""
    processor, model = vision_processor(family), vision_model(family)
    rows = []
    for row, count in enumerate((1, 2, 1) if family == "paligemma" else (1, 0, 2)):
        parts = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": "What is it? " * (1 + row)}]
        chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "red"}]}]
        images = {"images": [[picture(row + index) for index in range(count)]]} if count else {}
        text = processor.apply_chat_template(chat, tokenize=False)
        rows.append(dict(processor(text=[text], **images, return_tensors="pt")))
    inputs = {"use_cache": False}  # with a cache, transformers does not look for documents
    for name in [it for it in rows[0] if it not in ("attention_mask", "labels")]:
        values = [row[name] for row in rows if name in row]
        joined = torch.cat(values, dim=1 if values[0].shape[:2] == rows[0]["input_ids"].shape else 0)
        inputs[name] = joined.double() if joined.is_floating_point() else joined
    positions = [torch.arange(row["input_ids"].shape[1])[None] for row in rows]
    if hasattr(model.model, "get_rope_index"):
        of_axes = [model.model.get_rope_index(row["input_ids"], **{it: row.get(it) for it in OF_ROPE}) for row in rows]
        positions = [torch.cat([text[None], of_row]) for text, (of_row, _) in zip(positions, of_axes, strict=True)]
    return {**inputs, "position_ids": torch.cat(positions, dim=-1), "labels": inputs["input_ids"]}


def compare_packed(family):
    initialize_model_parallel(context_parallel_size=2)
    with InFloat64():
        expected, found = vision_model(family), parallelize(vision_model(family))
        losses = [model(**packed(family)).loss for model in (expected, found)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], **CLOSE)
        for (name, whole), part in zip(expected.named_parameters(), found.parameters(), strict=True):
            if whole.grad is not None:
                gradient = all_reduce(part.grad, get_group("cp"), op="avg")
                torch.testing.assert_close(gradient, whole.grad, **CLOSE, msg=lambda it, name=name: f"{name}: {it}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["glm4v", "internvl", "paligemma", "qwen2_5_vl", "qwen3_vl"])
def test_packed_conversations_with_images_are_split_with_their_positions_and_masks(run_ranks, family):
    run_ranks(compare_packed, 2, family)


def refuse_packed():
    initialize_model_parallel(context_parallel_size=2)
    model = parallelize(vision_model("gemma3"))
    with pytest.raises(ValueError, match="image blocks in packed documents from the start of each document"):
        model(**packed("gemma3"))
    model(**{name: it for name, it in packed("gemma3").items() if name != "position_ids"})  # nothing is left behind


def test_packed_images_whose_blocks_transformers_misplaces_are_refused(run_ranks):
    run_ranks(refuse_packed, 2)


def recompute(family):
    """Gradients at TP 2 + SP with decoder layers that run again in backward, after a batch of another kind."""
    initialize_model_parallel(2)
    with InFloat64():
        gradients = []
        for checkpointed in (False, True):
            model = parallelize(vision_model(family), sequence_parallel=True)
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            inputs = vision_inputs(family, [[0, 1]]), vision_inputs(family, [[0, 1]], pictures=False)
            losses = [model(**{name: value[0] for name, value in it.items()}).loss for it in inputs]
            sum(losses).backward()
            gradients.append({name: it.grad for name, it in model.named_parameters()})
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, **CLOSE, msg=lambda it, name=name: f"{name}: {it}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["granite4_vision", "mllama", "qwen3_vl"])
def test_layers_that_run_again_in_backward_read_the_features_of_their_own_forward(run_ranks, family):
    run_ranks(recompute, 2, family)


def generate(family):
    initialize_model_parallel(context_parallel_size=2)
    given = {name: it[0] for name, it in vision_inputs(family, [[0]]).items()}
    given = {name: it for name, it in given.items() if name not in ("labels", "num_items_in_batch")}
    texts = [
        model.eval().generate(**given, max_new_tokens=4, do_sample=False, use_cache=True)
        for model in (vision_model(family), parallelize(vision_model(family)))
    ]
    assert torch.equal(*texts)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", QUICK)
def test_generated_text_about_an_image_is_that_of_one_process(run_ranks, family):
    run_ranks(generate, 2, family)
