"""The documented mixed_precision_config: defaults, and mistakes, all of them at once."""

import pytest
import torch
from nxd_optim import resolve_mixed_precision


@pytest.mark.parametrize("zero_one_enabled", [False, True])
def test_mixed_precision_defaults_come_with_zero1(zero_one_enabled):
    resolved = resolve_mixed_precision(None, zero_one_enabled=zero_one_enabled)

    assert resolved.use_master_weights is zero_one_enabled
    assert resolved.use_fp32_grad_acc is zero_one_enabled
    assert resolved.use_master_weights_in_ckpt is False


def test_mixed_precision_given_values_win_and_the_config_stays_as_it_was():
    config = {"use_master_weights": True, "use_fp32_grad_acc": False, "use_master_weights_in_ckpt": True}
    before = dict(config)

    arguments = resolve_mixed_precision(config, zero_one_enabled=True).zero1_arguments(torch.bfloat16)

    assert arguments == {
        "optimizer_dtype": None,  # float32 or wider
        "use_grad_acc_hook": False,
        "higher_cc_precision": False,
        "save_master_weights": True,
    }
    assert config == before


def test_stochastic_rounding_replaces_master_weights_and_refuses_them():
    assert not resolve_mixed_precision({"use_stochastic_rounding": True}, zero_one_enabled=True).use_master_weights
    with pytest.raises(ValueError, match="use_stochastic_rounding=True replaces master weights"):
        resolve_mixed_precision({"use_stochastic_rounding": True, "use_master_weights": True}, zero_one_enabled=True)


def test_mixed_precision_without_zero1_raises_for_both_keys():
    config = {"use_master_weights": True, "use_fp32_grad_acc": True}

    with pytest.raises(ValueError, match=r"use_master_weights=True needs .*; use_fp32_grad_acc=True needs"):
        resolve_mixed_precision(config, zero_one_enabled=False)


def test_mixed_precision_mistakes_are_named_at_once():
    config = {"use_master_weight": True, "use_fp32_grad_acc": "yes", "use_master_weights_in_ckpt": True}

    with pytest.raises(ValueError, match="mixed_precision_config: ") as raised:
        resolve_mixed_precision({**config, "use_master_weights": False}, zero_one_enabled=True)

    for mistake in (
        "did you mean 'use_master_weights'",
        "'yes' must be True",
        "needs use_master_weights=True",
    ):
        assert mistake in str(raised.value)


def test_mixed_precision_without_master_weights_updates_parameters_in_their_own_dtype():
    resolved = resolve_mixed_precision({"use_master_weights": False}, zero_one_enabled=True)

    assert resolved.zero1_arguments(torch.bfloat16)["optimizer_dtype"] == torch.bfloat16
