"""Under `neuron_parallel_compile` every graph is recorded and nothing is left behind. All values are zeros there."""

import pytest
import torch
from nxd_engine import save_checkpoint
from nxd_state import initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training import StopRequest, prepare_run, run_training


def extract(settings: list[str]) -> tuple[int, int]:
    initialize_model_parallel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")
        state, resumed = prepare_run(load_recipe(None, settings))
        with StopRequest() as stop:
            result = run_training(state, resumed, stop)
    return result.step, len(state.optimizer.state)


def test_trial_run_takes_a_few_steps_and_leaves_nothing_but_tokens(run_ranks, settings, tmp_path):
    [(steps, states)] = run_ranks(extract, 1, [*settings, "checkpoint.save_every=1"])

    assert steps == 3
    assert states > 0  # the steps were whole ones
    assert {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")} <= {"tokens"}


def test_documented_save_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_EXTRACT_GRAPHS_ONLY", "1")

    save_checkpoint(tmp_path, "tag", torch.nn.Linear(2, 2))

    assert list(tmp_path.iterdir()) == []
