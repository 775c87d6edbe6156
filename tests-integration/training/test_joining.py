"""A rank that waits to join an elastic run takes nothing from what the run does at its steps."""

import math

import pytest
from nxd_state import destroy_model_parallel, initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.report.metrics import METRICS_FILE, read_records
from nxd_trainer.training import prepare_run, run_training


class AskedToChange:
    """Somebody waits to join after a step."""

    can_wait = True

    def __init__(self, step: int) -> None:
        self._left = step

    @property
    def signal_number(self) -> int:
        self._left -= 1
        return int(self._left == 0)


def run(settings: list[str], steps: list[int]) -> float:
    """A start after each of the steps, and one more."""
    for step in [*steps, 99]:
        initialize_model_parallel()
        result = run_training(*prepare_run(load_recipe(None, settings)), AskedToChange(step))
        destroy_model_parallel()
        if not result.stopped:
            return result.loss
    raise AssertionError("the last start was stopped as well")


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", [2, 3, 4])
def test_evaluation_that_is_due_when_a_rank_joins_is_made(run_ranks, settings, tmp_path, step):
    fixed = [*settings, "train.steps=4", "train.eval_every=2", "train.log_every=1", "checkpoint.save_every=0"]
    [loss] = run_ranks(run, 1, [*fixed, f"output={tmp_path}/alone"], [])
    [joined] = run_ranks(run, 1, [*fixed, f"output={tmp_path}/joined"], [step])

    alone, found = (read_records(tmp_path / name / METRICS_FILE) for name in ("alone", "joined"))
    assert [(it.step, it.held_out_loss) for it in found] == [(it.step, it.held_out_loss) for it in alone]
    assert alone[3].held_out_loss is not None
    assert joined == loss or (step == 4 and math.isnan(joined))  # there was nothing left to do
