"""Small vision-language models whose sequences are split over ranks: the loss and gradients of one process."""

from dataclasses import replace

import pytest
from hf_survey.comparison import TEXT_ALONE, Layout, one_process
from hf_survey.survey import judge

pytest.importorskip("torchvision", reason="processors of images need it: pip install torchvision")

from hf_survey.vision import VISION_FAMILIES

TENSOR, CONTEXT = Layout(tp=2, sp=True), Layout(cp=2)
BOTH = Layout(tp=2, cp=2, sp=True)
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
