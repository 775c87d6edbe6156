"""Mixed precision: the documented `mixed_precision_config`, and dynamic loss scaling for float16 gradients.

Micikevicius et al. 2018, "Mixed Precision Training": the loss is multiplied by a large number, so that small gradients
do not vanish in float16, and the gradients are divided by it again in float32. All ranks skip a step whose gradients
overflow on any of them, and the number is halved.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from nxd_state import active_group, all_reduce_, get_device
from torch import Tensor
from torch.optim import Optimizer

from nxd_optim.placement import require_mesh
from nxd_optim.zero import NeuronZero1Optimizer

SMALLEST_SCALE = 2.0**-24  # float16's smallest number: gradients that overflow at this scale overflow at any


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
    """Fill in defaults: master weights and float32 accumulation come with ZeRO, and only with it.

    Args:
        config: values for any fields of `MixedPrecision`; not modified.
        zero_one_enabled: whether the optimizer state is sharded over the replicas.

    Raises:
        ValueError: all mistakes at once: unknown keys, values that are not bool, master weights or float32
            accumulation without ZeRO, master weights in the checkpoint without master weights.
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


class LossScaleTooSmallError(RuntimeError):
    """Gradients are not finite at any loss scale, so loss or weights are not finite."""


class LossScaler:
    """Scales the loss, and skips steps whose gradients overflow on any rank of the job.

    A step is::

        scaler.scale(loss).backward()
        reducer.finish()                          # not with NeuronZero1Optimizer, which averages in its step
        scaler.unscale_(model.parameters())       # only to clip or inspect gradients before the step; not with ZeRO
        stepped = scaler.step(optimizer)

    With `NeuronZero1Optimizer` parameters may be float16: it unscales its float32 part of the gradients. Other
    optimizers need float32 parameters (under autocast), because unscaled float16 gradients would vanish again.

    Args:
        initial_scale: scale of the first step.
        growth_factor: growth of the scale after `growth_interval` steps without overflow.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: number of steps without overflow before the scale grows.

    Attributes:
        scale_factor: the current scale.
        skipped_steps: number of steps skipped so far.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        *,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not (0 < initial_scale < math.inf and growth_factor > 1 > backoff_factor > 0 and growth_interval >= 1):
            raise ValueError(
                f"initial_scale={initial_scale}, growth_factor={growth_factor}, backoff_factor={backoff_factor}, "
                f"growth_interval={growth_interval}: expected a positive scale, growth above 1, a backoff between 0 "
                "and 1, and an interval of 1 or more"
            )
        self.scale_factor = initial_scale
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = growth_interval
        self.skipped_steps = 0
        self._steps_since_change = 0
        self._finite: bool | None = None  # whether this step's gradients are finite, once they are unscaled

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss to call `backward` on."""
        return loss * self.scale_factor

    @torch.no_grad()
    def unscale_(self, parameters: Iterable[Tensor]) -> bool:
        """Divide complete gradients by the scale, in place; returns whether they are finite on all ranks.

        Every rank of the job calls this, once per step.

        Raises:
            RuntimeError: the gradients are already unscaled, or there are several ranks but no mesh.
            ValueError: a gradient is float16.
        """
        if self._finite is not None:
            raise RuntimeError("this step's gradients are already unscaled; call step() before unscale_() again")
        require_mesh()
        grads = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]
        for grad in grads:
            if grad.dtype == torch.float16:
                raise ValueError(
                    "float16 gradients vanish when they are divided by the scale; keep parameters in float32 and use "
                    "autocast, or train with NeuronZero1Optimizer"
                )
        finite = torch.ones((), device=grads[0].device if grads else get_device())
        for grad in grads:
            grad.mul_(1.0 / self.scale_factor)
            finite.mul_(grad.isfinite().all())
        everywhere = all_reduce_(finite, active_group("pp", "dp", "cp", "tp"), op="min")
        self._finite = bool(everywhere.item())
        return self._finite

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer unless gradients have overflowed, and adapt the scale; returns whether it stepped.

        Raises:
            LossScaleTooSmallError: gradients are not finite at any scale.
            RuntimeError: as `unscale_`.
            ValueError: as `unscale_`.
        """
        taken = self._step_zero1(optimizer) if isinstance(optimizer, NeuronZero1Optimizer) else self._step(optimizer)
        self._finite = None
        self._steps_since_change += 1
        if not taken:
            self.skipped_steps += 1
            self.scale_factor *= self.backoff_factor
            self._steps_since_change = 0
            if self.scale_factor < SMALLEST_SCALE:
                raise LossScaleTooSmallError(
                    f"gradients are not finite even at a loss scale of {self.scale_factor / self.backoff_factor}, and "
                    f"{self.skipped_steps} steps have been skipped: loss or weights are not finite; resume from a "
                    "checkpoint with a lower learning rate"
                )
        elif self._steps_since_change == self.growth_interval:
            self.scale_factor *= self.growth_factor
            self._steps_since_change = 0
        return taken

    @contextmanager
    def applied_to(self, optimizer: NeuronZero1Optimizer) -> Iterator[None]:
        """Have `clip_grad_norm` and `step` divide gradients by the scale in the block, and skip non-finite steps."""
        settings = optimizer.loss_scale, optimizer.skip_non_finite_steps
        optimizer.loss_scale, optimizer.skip_non_finite_steps = self.scale_factor, True
        try:
            yield
        finally:
            optimizer.loss_scale, optimizer.skip_non_finite_steps = settings

    def drop(self) -> None:
        """Drop a step whose gradients were unscaled, but which will not be taken."""
        self._finite = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {
            "scale_factor": self.scale_factor,
            "skipped_steps": self.skipped_steps,
            "steps_since_change": self._steps_since_change,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
        self.scale_factor = float(state["scale_factor"])
        self.skipped_steps = int(state["skipped_steps"])
        self._steps_since_change = int(state["steps_since_change"])

    def _step(self, optimizer: Optimizer) -> bool:
        if self._finite is None:
            self.unscale_(p for group in optimizer.param_groups for p in group["params"])
        if self._finite:
            optimizer.step()
        return bool(self._finite)

    def _step_zero1(self, optimizer: NeuronZero1Optimizer) -> bool:
        before = optimizer.skipped_steps
        with self.applied_to(optimizer):
            optimizer.step()
        return optimizer.skipped_steps == before
