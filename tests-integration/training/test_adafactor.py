"""Adafactor at every layout: losses, gradients and weights of ten steps are those of one process with torch's own.

The reference is `torch.optim.Adafactor` on the model's parameters in one process, in float64.
"""

import pytest
import torch
from optimizer_parity import MODELS, STEPS, check_resumed_run, report_of, settings_of

pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

ADAFACTOR = ["optimizer.type=adafactor", "optimizer.lr=0.05", "optimizer.config.d=1.2"]
TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
ACCUMULATE, EP2 = "train.gradient_accumulation_steps=2", "parallel.expert_parallel_size=2"
ZERO1, ZERO2, ZERO3 = (f"parallel.zero_stage={stage}" for stage in (1, 2, 3))
LAYOUTS = {
    "DP 2": (2, []),
    "TP 2": (2, [TP2]),
    "PP 2": (2, [PP2, ACCUMULATE]),
    "DP 2, ZeRO-1": (2, [ZERO1]),
    "DP 2, ZeRO-2": (2, [ZERO2]),
    "DP 2, ZeRO-3": (2, [ZERO3]),
    "DP 4, hybrid": (4, [ZERO3, "parallel.shard_group_size=2"]),
    "TP 2 x DP 2, ZeRO-1": (4, [TP2, ZERO1]),
    "TP 2 x DP 2, ZeRO-3": (4, [TP2, ZERO3]),
    "PP 2 x DP 2, ZeRO-1": (4, [PP2, ACCUMULATE, ZERO1]),
    "TP 2 x PP 2": (4, [TP2, PP2, ACCUMULATE]),
}
# Activations inside experts that are whole cannot be compared: each replica calls them with its tokens only.
OF_EXPERTS = {
    "TP 2": (2, [TP2]),
    "EP 2": (2, [EP2]),
    "EP 2, ZeRO-1": (2, [EP2, ZERO1]),
    "EP 2 x DP 2, ZeRO-1": (4, [EP2, ZERO1]),
    "EP 2, ZeRO-3": (2, [EP2, ZERO3]),
}
QUICK = [("own Llama", "TP 2 x DP 2, ZeRO-1"), ("Mixtral", "EP 2, ZeRO-1")]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, id=f"{model}, {layout}", marks=[] if (model, layout) in QUICK else pytest.mark.slow)
        for model in MODELS
        for layout in (OF_EXPERTS if model == "Mixtral" else LAYOUTS)
    ],
)
def test_steps_are_those_of_torch_in_one_process(run_ranks, settings, folder_of, model, layout):
    ranks, degrees = (LAYOUTS | OF_EXPERTS)[layout]

    report = run_ranks(
        report_of, ranks, [*settings_of(settings, folder_of, model), *ADAFACTOR, *degrees], torch.optim.Adafactor
    )[0]

    assert "DIFFERENT" not in report, report
    assert f"{STEPS} steps" in report


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("TP 2 x DP 2, ZeRO-1", "PP 2"),
        pytest.param("PP 2", "DP 2, ZeRO-1", marks=pytest.mark.slow),
        pytest.param("TP 2", "DP 4, hybrid", marks=pytest.mark.slow),
        pytest.param("DP 2", "TP 2 x DP 2, ZeRO-3", marks=pytest.mark.slow),
    ],
)
def test_run_that_resumes_at_another_layout_is_the_run_of_one_process(run_ranks, settings, tmp_path, saved, loaded):
    check_resumed_run(run_ranks, [*settings, *ADAFACTOR], tmp_path, [LAYOUTS[saved], LAYOUTS[loaded]])
