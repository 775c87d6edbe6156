"""Devices are found by name, with numbers of one's own where wanted."""

import pytest
from nxd_plan import DEVICES, find_device


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_a_peak_for_both_dtypes_and_says_where_its_numbers_are_from(name):
    device = find_device(name)
    assert device.flops_of("bfloat16") >= device.flops_of("float32") > 0
    assert len((DEVICES[name].__doc__ or "").splitlines()) > 2


def test_names_are_taken_in_any_case():
    assert find_device("H100") == find_device("h100")


def test_numbers_given_replace_those_of_the_device_and_none_does_not():
    device = find_device("h100", memory_bytes=1e9, flops=2e12, memory_bandwidth=None)
    assert (device.memory_bytes, device.flops_of("float32")) == (1e9, 2e12)
    assert device.memory_bandwidth == find_device("h100").memory_bandwidth


def test_an_unknown_device_is_named_with_the_nearest_one_and_all_there_are():
    with pytest.raises(
        ValueError, match=r"unknown device 'h10'; did you mean 'h100'\? Use one of trn1, trn2, inf2, h100"
    ):
        find_device("h10")


@pytest.mark.parametrize("number", [0, -1.0])
def test_numbers_that_are_not_positive_are_refused(number):
    with pytest.raises(ValueError, match=r"memory_bytes=.* must be positive"):
        find_device("cpu", memory_bytes=number)


def test_a_dtype_without_a_peak_is_refused():
    with pytest.raises(ValueError, match=r"no FLOP/s for float16; use one of bfloat16, float32"):
        find_device("cpu").flops_of("float16")
