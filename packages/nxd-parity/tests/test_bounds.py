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
