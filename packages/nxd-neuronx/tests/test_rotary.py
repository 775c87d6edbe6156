"""Rotary positions against products of complex numbers, and stretched frequencies against their definition."""

import math

import pytest
import torch
from nxd_neuronx.attention import (
    ROPE_DEFAULTS,
    apply_rotary_polar_compatible,
    apply_scaling,
    precompute_freqs_cis,
)


def test_rotation_is_a_product_of_complex_numbers():
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 5, 3, 8)
    angles = precompute_freqs_cis(8, 5)

    rotated = apply_rotary_polar_compatible(query, key.bfloat16(), angles.expand(2, -1, -1))

    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.view_as_real(torch.view_as_complex(query.unflatten(-1, (-1, 2))) * turns).flatten(-2)
    torch.testing.assert_close(rotated[0], expected)
    assert rotated[1].dtype == torch.bfloat16


def test_angles_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match=r"freqs_cis is torch\.bfloat16; expected torch\.float32"):
        apply_rotary_polar_compatible(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1).bfloat16())


def test_scaling_keeps_short_waves_stretches_long_ones_and_blends_between():
    context = ROPE_DEFAULTS["original_max_position_embeddings"]
    wavelengths = torch.tensor([context / 8, context / 4, context / 2, context, context * 2], dtype=torch.float64)
    freqs = 2 * math.pi / wavelengths

    factors = apply_scaling(freqs) / freqs

    smooth = (2 - 1) / (4 - 1)
    expected = torch.tensor([1, 1, smooth + (1 - smooth) / 8, 1 / 8, 1 / 8], dtype=torch.float64)
    torch.testing.assert_close(factors, expected)
    assert precompute_freqs_cis(8, 3, 5e5, True, factor=2)[2].ne(precompute_freqs_cis(8, 3, 5e5)[2]).any()
