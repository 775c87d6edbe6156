"""The documented `mixed_precision_config`: its meaning, its checks, and its translation to ZeRO-1 arguments."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class MixedPrecision:
    """How low-precision parameters are trained.

    Attributes:
        use_master_weights: keep a float32 copy of the weights, sharded over the replicas, and update that.
        use_fp32_grad_acc: accumulate gradients over microbatches, and average them, in float32.
        use_master_weights_in_ckpt: save the float32 copy with the optimizer's state.
        use_stochastic_rounding: round bfloat16 weights stochastically, in place of master weights; see
            `StochasticRounding`.
        use_loss_scaling: multiply the loss by a scale that adapts, for float16; see `LossScaler`.
    """

    use_master_weights: bool
    use_fp32_grad_acc: bool
    use_master_weights_in_ckpt: bool = False
    use_loss_scaling: bool = False
    use_stochastic_rounding: bool = False

    def zero1_arguments(self, parameter_dtype: torch.dtype) -> dict[str, Any]:
        """Return the keyword arguments of `NeuronZero1Optimizer`, for parameters of this dtype."""
        return {
            "optimizer_dtype": None if self.use_master_weights else parameter_dtype,
            "use_grad_acc_hook": self.use_fp32_grad_acc,
            "higher_cc_precision": self.use_fp32_grad_acc,
            "save_master_weights": self.use_master_weights_in_ckpt,
        }


def resolve_mixed_precision(config: Mapping[str, object] | None, *, zero_one_enabled: bool) -> MixedPrecision:
    """Fill in defaults: master weights and float32 accumulation come with ZeRO-1, and only with it.

    Args:
        config: values for any fields of `MixedPrecision`; not modified.
        zero_one_enabled: whether the optimizer state is sharded over the replicas.

    Raises:
        ValueError: all mistakes at once: unknown keys, values that are not bool, master weights or float32
            accumulation without ZeRO-1, master weights in the checkpoint without master weights.
    """
    given = dict(config or {})
    known = [field.name for field in fields(MixedPrecision)]
    mistakes = []
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            mistakes.append(f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"expected {known}"))
        elif not isinstance(value, bool):
            mistakes.append(f"{key}={value!r} must be True or False")
    choice = {
        "use_master_weights": zero_one_enabled and not given.get("use_stochastic_rounding"),
        "use_fp32_grad_acc": zero_one_enabled,
        "use_master_weights_in_ckpt": False,
        "use_loss_scaling": False,
        "use_stochastic_rounding": False,
        **given,
    }
    for key in ("use_master_weights", "use_fp32_grad_acc"):
        if choice[key] and not zero_one_enabled:
            mistakes.append(f"{key}=True needs zero_one_enabled=True in the optimizer config")
    if choice["use_master_weights"] and choice["use_stochastic_rounding"]:
        mistakes.append("use_stochastic_rounding=True replaces master weights; leave use_master_weights out")
    if choice["use_master_weights_in_ckpt"] and not choice["use_master_weights"]:
        mistakes.append("use_master_weights_in_ckpt=True needs use_master_weights=True")
    if mistakes:
        raise ValueError("mixed_precision_config: " + "; ".join(mistakes))
    return MixedPrecision(**{key: bool(value) for key, value in choice.items()})
