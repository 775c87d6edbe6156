import pytest
from nxd_pipeline.schedules import ActivationSize, activations_kept, custom_schedule, make_schedule, peak_in_flight

SPLIT = [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]]


def test_activations_kept_until_all_gradients_are_made():
    assert activations_kept(custom_schedule(SPLIT)) == ((1, 2, 2, 2, 1, 0),)


def test_activations_kept_in_bytes_shrink_or_grow_between_both_backwards():
    schedule = custom_schedule(SPLIT)

    assert activations_kept(schedule, [ActivationSize(10, 4)]) == ((10, 20, 14, 8, 4, 0),)
    assert peak_in_flight(schedule, [ActivationSize(10, 14)]) == (28,)


def test_peak_in_flight_in_bytes_weighs_each_stage():
    schedule = make_schedule("gpipe", 2, 3, virtual_pipeline_size=2)

    assert peak_in_flight(schedule, [ActivationSize(size, size) for size in (1, 10, 100, 1000)]) == (303, 3030)


def test_peak_in_flight_of_forward_only_is_nothing():
    assert peak_in_flight(make_schedule("inference", 2, 3)) == (0, 0)


def test_peak_in_flight_of_sizes_for_other_stages_raises():
    with pytest.raises(ValueError, match="1 sizes for a schedule of 2 stages; pass one for each stage"):
        peak_in_flight(make_schedule("1f1b", 2, 3), [ActivationSize()])
