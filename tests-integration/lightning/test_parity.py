"""A Trainer computes what `nxd train` computes, at every layout, and so does one that goes on at another layout."""

import pytest
import torch

pytestmark = pytest.mark.sample(3)  # each takes its time

RTOL = 1e-10
LAYOUTS = {
    "tp2": {"world": 2, "tp": 2},
    "tp2-pp2": {"world": 4, "tp": 2, "pp": 2},
    "cp2": {"world": 2, "cp": 2},
    "dp2-zero1": {"world": 2, "zero_stage": 1},
    "dp2-zero2": {"world": 2, "zero_stage": 2},
    "dp2-zero3": {"world": 2, "zero_stage": 3},
    "pp2-dp2-zero3": {"world": 4, "pp": 2, "zero_stage": 3},
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
        {"world": 2, "zero_stage": 1, "grad_accum_steps": 2, "manual_opt": False},
        {"world": 2, "zero_stage": 2, "grad_accum_steps": 2},
        {"world": 2, "zero_stage": 3, "grad_accum_steps": 2, "manual_opt": False},
        {"world": 2, "pp": 2, "grad_accum_steps": 2},
        {"world": 2, "pp": 2, "grad_accum_steps": 2, "manual_opt": False},
    ],
    ids=["manual", "dp2-zero1-automatic", "dp2-zero2", "dp2-zero3-automatic", "pp2-manual", "pp2-automatic"],
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
    [
        ({"world": 2, "tp": 2}, {"world": 2, "pp": 2}),
        ({"world": 2, "zero_stage": 1}, {"world": 2, "tp": 2}),
        ({"world": 2, "zero_stage": 2}, {"world": 2, "zero_stage": 3}),
        ({"world": 2, "zero_stage": 3}, {"world": 1}),
    ],
    ids=["tp2-to-pp2", "dp2-zero1-to-tp2", "dp2-zero2-to-zero3", "dp2-zero3-to-one"],
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


@pytest.mark.parametrize("stage", [2, 3])
def test_validation_with_zero_equals_one_process(fit, layout, stage):
    options = {"limit_val_batches": 2, "val_check_interval": 1, "max_steps": 2}

    [alone] = fit(layout(), **options)

    for rank in fit(layout(world=2, zero_stage=stage), **options):
        assert_same([rank.metrics["val_loss"]], [alone.metrics["val_loss"]])


@pytest.mark.parametrize("manual", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_not_whole_between_accumulated_batches(fit, layout, stage, manual):
    def make_watch():
        from lightning.pytorch import Callback

        class Watch(Callback):
            def on_train_batch_end(self, trainer, pl_module, *batch):
                [optimizer] = trainer.strategy.optimizers
                assert optimizer.memory_report().measured.gradients == 0

        return Watch()

    ranks = fit(
        layout(world=2, zero_stage=stage, grad_accum_steps=2, manual_opt=manual), callbacks=[make_watch()], max_steps=2
    )

    assert [rank.global_step for rank in ranks] == [2, 2]
