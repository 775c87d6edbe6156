"""Small vision-language models on two and four ranks: the loss and gradients of one process, in float64."""

import pytest
from hf_survey.comparison import TEXT_ALONE, Layout, one_process
from hf_survey.survey import judge

pytest.importorskip("torchvision", reason="processors of images need it: pip install torchvision")

from hf_survey.vision import VISION_FAMILIES

LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2), Layout(dp=2))
QUICK = ["gemma3", "qwen3_vl", "mllama"]  # features in the embeddings, between layers, and in cross-attention


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", ["with images", "text alone"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "family", [pytest.param(it, marks=() if it in QUICK else pytest.mark.slow) for it in VISION_FAMILIES]
)
def test_vision_language_model_over_ranks_gives_the_numbers_of_one_process(run_ranks, family, layout, rows):
    named = family if rows == "with images" else f"{family}{TEXT_ALONE}"
    expected = one_process(named)

    verdict = judge(run_ranks, named, layout, expected, 120.0)

    assert (verdict.outcome, verdict.reason) == ("pass", "")
