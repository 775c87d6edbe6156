import math

import pytest
from nxd_trainer.lr_schedule import lr_multiplier


def test_warm_up_rises_linearly_and_moves_at_once():
    rates = [lr_multiplier(step, total_steps=100, warmup_steps=4) for step in range(5)]

    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize(
    ("schedule", "half_way", "end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1.0, 1.0)]
)
def test_decay_reaches_its_middle_and_its_end(schedule, half_way, end):
    settings = {"total_steps": 110, "warmup_steps": 10, "min_lr_ratio": 0.1, "schedule": schedule}

    assert lr_multiplier(10, **settings) == 1.0
    assert lr_multiplier(60, **settings) == pytest.approx(half_way)
    assert lr_multiplier(110, **settings) == pytest.approx(end)
    assert lr_multiplier(500, **settings) == pytest.approx(end)


def test_cosine_differs_from_linear_at_a_quarter():
    assert lr_multiplier(25, total_steps=100, schedule="cosine") == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert lr_multiplier(25, total_steps=100, schedule="linear") == pytest.approx(0.75)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_multiplier_never_rises_after_the_warm_up(schedule):
    rates = [lr_multiplier(step, total_steps=50, warmup_steps=5, schedule=schedule) for step in range(4, 60)]

    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0


def test_warm_up_longer_than_the_run_never_divides_by_zero():
    assert lr_multiplier(9, total_steps=10, warmup_steps=20) == 0.5
    assert lr_multiplier(20, total_steps=10, warmup_steps=20, min_lr_ratio=0.1) == 1.0


@pytest.mark.parametrize(("decay_type", "half_way"), [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - math.sqrt(0.5))])
def test_warmup_stable_decay_stays_and_falls_at_the_end(decay_type, half_way):
    settings = {"total_steps": 100, "warmup_steps": 10, "schedule": "warmup_stable_decay", "num_decay_steps": 20}

    rates = [lr_multiplier(step, **settings, decay_type=decay_type) for step in (9, 10, 79, 80, 90, 100, 200)]

    assert rates == pytest.approx([1.0, 1.0, 1.0, 1.0, half_way, 0.0, 0.0])


def test_warmup_stable_decay_falls_in_the_last_tenth_where_nothing_is_said():
    rates = [lr_multiplier(step, total_steps=100, schedule="warmup_stable_decay") for step in (89, 90, 95, 100)]

    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_restarts_polynomial_and_inverse_root_are_as_their_names_say():
    restarts = [
        lr_multiplier(step, total_steps=100, schedule="cosine_with_restarts", num_cycles=2) for step in (25, 50)
    ]
    polynomial = lr_multiplier(50, total_steps=100, min_lr_ratio=0.2, schedule="polynomial", power=2)
    inverse = [lr_multiplier(step, total_steps=9, warmup_steps=4, schedule="inverse_sqrt") for step in (4, 16, 64)]

    assert restarts == pytest.approx([0.5, 1.0])
    assert polynomial == pytest.approx(0.2 + 0.8 * 0.25)
    assert inverse == pytest.approx([1.0, 0.5, 0.25])


def test_unknown_schedule_says_which_there_are():
    with pytest.raises(ValueError, match=r"schedule='step' is unknown; use cosine, linear, .* or inverse_sqrt"):
        lr_multiplier(0, total_steps=1, schedule="step")
