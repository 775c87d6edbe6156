"""What is rounding: the spread of recordings with noise, of tensors alike where one has too few elements."""

import pytest
import torch
from nxd_parity import compare, record
from nxd_parity.events import Placement


@pytest.fixture
def recorded(tmp_path):
    """Records a step of bfloat16 numbers by hand: gradients by the layer that has them, and a loss."""

    def record_numbers(name, gradients, loss=4.4375):
        with record(tmp_path / name, by_hand=True) as recorder:
            recorder.tensor("loss", "", torch.tensor(loss, dtype=torch.bfloat16), placement=Placement((), ()))
            for layer, value in enumerate(gradients):
                recorder.tensor("gradient", f"layers.{layer}.alpha", torch.tensor([value], dtype=torch.bfloat16))
            recorder.end_step()
        return tmp_path / name

    return record_numbers


@pytest.mark.parametrize(("found", "is_rounding"), [(-0.0097, True), (-0.0150, True), (-0.0196, False)])
def test_number_that_noise_does_not_move_has_the_spread_of_those_alike(recorded, found, is_rounding):
    reference = recorded("reference", [0.0024, -0.0098])
    spread = [recorded("noise-1", [0.0031, -0.0098]), recorded("noise-2", [0.0021, -0.0098])]

    report = compare(reference, recorded("candidate", [0.0025, found]), spread=spread)

    assert report.agrees == is_rounding, report


@pytest.mark.parametrize(("found", "is_rounding"), [(4.46875, True), (4.5625, False)], ids=["a unit", "four units"])
def test_loss_in_bfloat16_may_be_a_unit_in_its_last_place_apart(recorded, found, is_rounding):
    reference = recorded("reference", [0.0024])

    report = compare(reference, recorded("candidate", [0.0024], loss=found), spread=[recorded("noise", [0.0024])])

    assert report.agrees == is_rounding, report


@pytest.mark.parametrize(
    ("gradient", "found", "is_rounding"),
    [(1e-4, 1.1, True), (1e-4, 1.25, False), (0.5, 1.1, False)],
    ids=["its sign is rounding", "further than a step", "its sign is none"],
)
def test_element_that_adam_moves_by_the_sign_of_rounding_may_go_the_other_way(tmp_path, gradient, found, is_rounding):
    def record_step(name, first_of_gradient, first_of_parameter):
        gradients, after = torch.ones(128), torch.full((128,), 1.1)
        gradients[0], after[0] = first_of_gradient, first_of_parameter
        whole = Placement((128,), (0,))
        with record(tmp_path / name, by_hand=True) as recorder:
            recorder.tensor("parameter", "w", torch.ones(128), placement=whole)
            recorder.tensor("gradient", "w", gradients.bfloat16(), placement=whole)
            recorder.end_step()
            recorder.tensor("parameter", "w", after.bfloat16(), placement=whole)
            recorder.tensor("optimizer state", "w/exp_avg_sq", torch.ones(128), placement=whole)
        return tmp_path / name

    reference = record_step("reference", gradient, 0.9)
    spread = [record_step("noise", gradient + 2e-3, 0.9)]

    assert compare(reference, record_step("candidate", gradient, found), spread=spread).agrees == is_rounding


@pytest.mark.parametrize(
    ("gradient", "times", "is_rounding"),
    [(4e-9, 1.01, True), (4e-9, 2.0, False), (1e-3, 1.01, False)],
    ids=["as rounding changes its gradient", "twice as far", "its gradient is large"],
)
def test_step_of_adam_below_its_eps_changes_as_the_gradient_does(tmp_path, gradient, times, is_rounding):
    def record_step(name, times):
        whole = Placement((128,), (0,))
        with record(tmp_path / name, by_hand=True) as recorder:
            recorder.tensor("parameter", "w", torch.full((128,), 0.02), placement=whole)
            recorder.tensor("parameter", "largest", torch.full((128,), 0.02), placement=whole)
            recorder.tensor("gradient", "w", torch.full((128,), gradient), placement=whole)
            recorder.tensor("gradient", "largest", torch.full((128,), 1e-2), placement=whole)
            recorder.end_step()
            recorder.tensor("parameter", "largest", torch.full((128,), 0.01), placement=whole)
            after = 0.02 - times * 1e-2 * gradient / (gradient + 1e-8)
            recorder.tensor("parameter", "w", torch.full((128,), after), placement=whole)
            recorder.tensor("optimizer state", "w/exp_avg_sq", torch.full((128,), gradient**2), placement=whole)
        return tmp_path / name

    reference = record_step("reference", 1.0)

    assert compare(reference, record_step("candidate", times)).agrees == is_rounding
