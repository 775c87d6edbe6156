"""Muon at every layout: losses, gradients and weights of ten steps are those of one process with torch's own Muon.

The reference is torch's Muon for the matrices, experts each their own, and torch's AdamW for the rest, in float64.
"""

from itertools import accumulate, pairwise

import pytest
import torch
from nxd_state.parameter_marks import get_matrix_layout
from optimizer_parity import MODELS, STEPS, check_resumed_run, losses, report_of, settings_of
from runs_by_hand import train_in_float64
from torch import nn

pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

MUON = ["optimizer.type=muon", "optimizer.lr=0.01", "optimizer.config.momentum=0.9"]
TP2, PP2 = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
ACCUMULATE, EP2 = "train.gradient_accumulation_steps=2", "parallel.expert_parallel_size=2"
ZERO1, ZERO3 = "parallel.zero_stage=1", "parallel.zero_stage=3"
LAYOUTS = {
    "DP 2": (2, []),
    "TP 2": (2, [TP2]),
    "PP 2": (2, [PP2, ACCUMULATE]),
    "DP 2, ZeRO-1": (2, [ZERO1]),
    "TP 2 x DP 2, ZeRO-1": (4, [TP2, ZERO1]),
    "DP 2, ZeRO-3": (2, [ZERO3]),
    "TP 2 x DP 2, ZeRO-3": (4, [TP2, ZERO3]),
    "PP 2 x DP 2, ZeRO-1": (4, [PP2, ACCUMULATE, ZERO1]),
}
OF_EXPERTS = {"TP 2": (2, [TP2]), "EP 2": (2, [EP2]), "EP 2, ZeRO-1": (2, [EP2, ZERO1])}
REPLICATED_EXPERTS = ("PP 2", "DP 2, ZeRO-1", "TP 2 x DP 2, ZeRO-1", "DP 2, ZeRO-3", "TP 2 x DP 2, ZeRO-3")
QUICK = [("own Llama", "TP 2 x DP 2, ZeRO-1"), ("Qwen3", "PP 2"), ("Mixtral", "EP 2, ZeRO-1")]


def _matrices_in(parameter):
    if parameter.dim() < 3:
        return [...]
    layout = get_matrix_layout(parameter)
    bounds = [0, *accumulate(layout.sections if layout and layout.sections else [parameter.shape[1]])]
    return [(expert, slice(*part)) for expert in range(len(parameter)) for part in pairwise(bounds)]


class TorchMuon(torch.optim.Optimizer):
    """torch's Muon and AdamW for the groups of a recipe; a stack of experts is a list of matrices."""

    def __init__(self, groups, betas, adamw_eps, **settings):
        super().__init__(groups, {})
        self._matrices = [
            (parameter, index, nn.Parameter(parameter.data[index]))
            for group in self.param_groups
            if group["use_muon"]
            for parameter in group["params"]
            for index in _matrices_in(parameter)
        ]
        decay = self.param_groups[0]["weight_decay"]
        others = [{"params": it["params"], "weight_decay": it["weight_decay"]} for it in groups if not it["use_muon"]]
        self._optimizers = [
            torch.optim.Muon([matrix for _, _, matrix in self._matrices], weight_decay=decay, **settings),
            torch.optim.AdamW(others, lr=settings["lr"], betas=betas, eps=adamw_eps),
        ]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, index, matrix in self._matrices:
            matrix.grad = parameter.grad[index]
        for optimizer in self._optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, id=f"{model}, {layout}", marks=[] if (model, layout) in QUICK else pytest.mark.slow)
        for model in MODELS
        # Activations inside experts that are whole cannot be compared: each replica calls them with its tokens only.
        for layout in (OF_EXPERTS if model == "Mixtral" else LAYOUTS)
    ],
)
def test_steps_are_those_of_torch_in_one_process(run_ranks, settings, folder_of, model, layout):
    ranks, degrees = (LAYOUTS | OF_EXPERTS)[layout]

    report = run_ranks(report_of, ranks, [*settings_of(settings, folder_of, model), *MUON, *degrees], TorchMuon)[0]

    assert "DIFFERENT" not in report, report
    assert f"{STEPS} steps" in report


@pytest.mark.slow
@pytest.mark.parametrize("layout", REPLICATED_EXPERTS)
def test_losses_with_whole_experts_are_those_of_one_process(run_ranks, settings, folder_of, tmp_path, layout):
    settings = [*settings_of(settings, folder_of, "Mixtral"), *MUON, "train.steps=10", "train.eval_every=0"]
    ranks, degrees = LAYOUTS[layout]

    run_ranks(train_in_float64, 1, [*settings, f"output={tmp_path / 'one'}"])
    run_ranks(train_in_float64, ranks, [*settings, *degrees])

    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-10, abs=0)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("TP 2 x DP 2, ZeRO-1", "PP 2"),
        pytest.param("PP 2", "DP 2, ZeRO-1", marks=pytest.mark.slow),
        pytest.param("DP 2", "TP 2 x DP 2, ZeRO-3", marks=pytest.mark.slow),
    ],
)
def test_run_that_resumes_at_another_layout_is_the_run_of_one_process(run_ranks, settings, tmp_path, saved, loaded):
    check_resumed_run(run_ranks, [*settings, *MUON], tmp_path, [LAYOUTS[saved], LAYOUTS[loaded]])
