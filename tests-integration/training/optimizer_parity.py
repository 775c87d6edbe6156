"""Runs of an optimizer at any layout beside one process with torch's own, on small models in float64."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from nxd_trainer.parity import compare as parity
from nxd_trainer.parity.one_process import record_one_process
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report import read_records
from nxd_trainer.training.parity_case import case_of_recipe
from runs_by_hand import SIZES, train_in_float64

STEPS = 10
MODELS: dict[str, Any] = {
    "own Llama": None,
    "Qwen3": ("qwen3", {"head_dim": 8}),
    "Mixtral": ("mixtral", {"num_local_experts": 4}),
}


def save_model(name: str, folder: Path) -> None:
    """Write one of these models with random weights in float64, as transformers saves it."""
    import transformers

    model_type, further = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **further)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).double().save_pretrained(folder)


def settings_of(settings: list[str], folder_of: Callable[[str], Path], model: str) -> list[str]:
    """The settings of a recipe that trains one of these models."""
    if MODELS[model] is None:
        return settings
    own = [it for it in settings if not it.startswith("model.")]
    return [*own, f"model.path={folder_of(model)}"]


def report_of(settings: list[str], optimizer_class: type[torch.optim.Optimizer]) -> str:
    """What `nxd parity` says of a recipe beside one process that trains with `optimizer_class`."""

    def by_torch(case: Any, *others: Any) -> None:
        record_one_process(replace(case, optimizer_class=optimizer_class), *others)

    case = case_of_recipe(load_recipe(None, settings), STEPS)
    with patch("nxd_trainer.parity.comparison.record_one_process", by_torch):
        return str(parity(case, dtype=torch.float64))


def losses(folder: Path) -> list[float]:
    """The losses of a run, by step."""
    return [record.loss for record in read_records(folder / "metrics.jsonl")]


def check_resumed_run(
    run_ranks: Callable[..., Any], settings: list[str], folder: Path, layouts: list[tuple[int, list[str]]]
) -> None:
    """Check that a run of two layouts, each for two steps, has the losses of a run of one process."""
    settings = [*settings, "train.steps=4", "train.eval_every=0", "optimizer.warmup_steps=0"]
    run_ranks(train_in_float64, 1, [*settings, f"output={folder / 'one'}"])

    for (ranks, degrees), further in zip(layouts, (["train.stop_after=2"], []), strict=True):
        run_ranks(train_in_float64, ranks, [*settings, *degrees, *further])

    expected = losses(folder / "one")
    assert losses(folder / "run") == pytest.approx(expected, rel=1e-10, abs=0)
    assert expected[-1] < expected[0]
