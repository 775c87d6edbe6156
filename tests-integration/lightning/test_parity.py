"""A Trainer computes what `nxd train` computes, at every layout, and so does one that goes on at another layout."""

import pytest
import torch

pytestmark = pytest.mark.sample(3)  # each takes its time

RTOL = 1e-10
LAYOUTS = {
    "tp2": {"world": 2, "tp": 2},
    "tp2-pp2": {"world": 4, "tp": 2, "pp": 2},
    "cp2": {"world": 2, "cp": 2},
    "dp2-zero1": {"world": 2, "zero1": True},
    "tp2-pp2-scaled": {"world": 4, "tp": 2, "pp": 2, "loss_scaling": True},  # by a power of two: exact
}


def assert_same(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=RTOL, atol=0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_losses_of_a_trainer_equal_those_of_nxd_train(fit, layout, reference, changes):
    ranks = fit(layout(**changes))

    for rank in ranks:
        assert rank.global_step == len(reference)
        assert_same(rank.losses, reference)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"world": 1, "grad_accum_steps": 2},
        {"world": 2, "zero1": True, "grad_accum_steps": 2, "manual_opt": False},
        {"world": 2, "pp": 2, "grad_accum_steps": 2},
        {"world": 2, "pp": 2, "grad_accum_steps": 2, "manual_opt": False},
    ],
    ids=["manual", "dp2-zero1-automatic", "pp2-manual", "pp2-automatic"],
)
def test_accumulated_batches_are_one_batch(fit, layout, reference, changes):
    for rank in fit(layout(**changes)):
        assert rank.global_step == len(reference)
        assert_same(rank.losses, reference)


def test_accumulation_of_the_trainer_is_that_of_the_module(fit, layout, reference):
    module_alone = layout(grad_accum_steps=2, manual_opt=False)

    [rank] = fit(module_alone, accumulate_grad_batches=2)

    assert_same(rank.losses, reference)


@pytest.mark.parametrize(
    ("before", "after"),
    [({"world": 2, "tp": 2}, {"world": 2, "pp": 2}), ({"world": 2, "zero1": True}, {"world": 2, "tp": 2})],
    ids=["tp2-to-pp2", "dp2-zero1-to-tp2"],
)
def test_run_goes_on_from_last_at_another_layout(fit, layout, reference, before, after):
    checkpoint = {"save_last": True, "every_n_train_steps": 1, "save_top_k": 1}

    first = fit(layout(**before), max_steps=3, checkpoint=checkpoint)
    second = fit(layout(**after), ckpt_path="last", checkpoint=checkpoint)

    for rank in first:
        assert_same(rank.losses, reference[:3])
    for rank in second:
        assert rank.global_step == len(reference)
        assert_same(rank.losses, reference[3:])
