"""Stochastic rounding: training bfloat16 weights without a float32 copy of them.

Rounding to nearest loses every update smaller than half a unit in the last of bfloat16's 8 bits. Rounding up with a
probability equal to the fraction cut off keeps such updates on average (Gupta et al. 2015, "Deep Learning with Limited
Numerical Precision"; Zamirai et al. 2020, "Revisiting BFloat16 Training").
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nxd_optim.zero1 import NeuronZero1Optimizer


def stochastic_round(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to one of the two neighboring bfloat16 values at random, so that the mean over many draws is exact.

    Args:
        values: a float32 tensor of any shape. Infinities and NaN do not change.
        generator: random generator on the same device; torch's default one if None.

    Raises:
        ValueError: `values` is not float32.
    """
    if values.dtype != torch.float32:
        raise ValueError(f"cannot round {values.dtype} stochastically; expected torch.float32")
    # bfloat16 is the upper half of float32's bits: noise added to the lower half carries with the right probability.
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


class StochasticRounding:
    """Makes an optimizer update its bfloat16 parameters in float32 and round the result stochastically.

    Parameters of other dtypes are not affected. The optimizer's state becomes float32. During `step`, a float32 copy of
    the parameters exists (with ZeRO-1, of this rank's part of a bucket).

    Replicas stay bitwise equal, and so do copies of a weight on other ranks: equal tensors get equal noise, which
    depends only on `seed` and the number of the step.

    Args:
        optimizer: any torch optimizer. A `NeuronZero1Optimizer` must have been created with
            `optimizer_dtype=torch.bfloat16`, and have all its parameter groups.
        seed: the random seed, the same on every rank.

    Raises:
        ValueError: a `NeuronZero1Optimizer` that keeps master weights, which need no such rounding.
    """

    def __init__(self, optimizer: Optimizer, *, seed: int = 0) -> None:
        self.seed = seed
        self.steps = 0
        self._rounded: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its bfloat16 data and gradient
        self._loading: dict[str, Any] = {}
        self._hooks = [hook for each in _updating_optimizers(optimizer) for hook in self._attach(each)]

    def state_dict(self) -> dict[str, int]:
        """Return the state to save, so that a resumed run draws the same noise."""
        return {"seed": self.seed, "steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from a `state_dict`."""
        self.seed, self.steps = state["seed"], state["steps"]

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _attach(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [
            optimizer.register_step_pre_hook(self._widen),
            optimizer.register_step_post_hook(self._round),
            optimizer.register_load_state_dict_pre_hook(self._remember),
            optimizer.register_load_state_dict_post_hook(self._restore_state),
        ]

    def _remember(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loading = state_dict

    def _restore_state(self, optimizer: Optimizer) -> None:
        """Restore the float32 states that torch has rounded to their parameters' dtype on loading."""
        indices = [index for group in self._loading["param_groups"] for index in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for key, value in self._loading["state"].get(index, {}).items():
                if parameter.dtype == torch.bfloat16 and isinstance(value, Tensor) and value.dtype == torch.float32:
                    place = optimizer.state[parameter][key].device
                    optimizer.state[parameter][key] = value.to(place, copy=True)
        self._loading = {}

    def _widen(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype == torch.bfloat16 and parameter.grad is not None:
                    self._rounded.append((parameter, parameter.data, parameter.grad))
                    grad, parameter.grad = parameter.grad, None
                    parameter.data = parameter.data.float()
                    parameter.grad = grad.float()

    def _round(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for parameter, data, grad in self._rounded:
            generator = torch.Generator(device=data.device).manual_seed((self.seed << 32) + self.steps)
            data.copy_(stochastic_round(parameter.data, generator))
            parameter.grad = None
            parameter.data = data
            parameter.grad = grad
        self._rounded = []


def _updating_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that update weights: with ZeRO-1, one for each bucket."""
    if not isinstance(optimizer, NeuronZero1Optimizer):
        return [optimizer]
    if optimizer.optimizer_dtype != torch.bfloat16:
        raise ValueError(
            f"NeuronZero1Optimizer with optimizer_dtype={optimizer.optimizer_dtype} updates master weights, which are "
            "not rounded; create it with optimizer_dtype=torch.bfloat16, or do not use stochastic rounding"
        )
    return [base for _, base in optimizer.parts()]
