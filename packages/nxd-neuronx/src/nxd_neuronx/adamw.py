"""AdamW for scripts of NeuronX Distributed: moments and arithmetic in float32 for parameters of any dtype."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from nxd_neuronx.arguments import say_without_effect


class AdamW_FP32OptimParams(Optimizer):  # noqa: N801  (the documented name)
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), computed in float32 or wider.

    A bfloat16 parameter is rounded once a step, after the update. For a float32 copy of the weights as well, use
    ZeRO-1 with `use_master_weights`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = True,
        differentiable: bool = False,
        capturable: bool = False,
    ) -> None:
        """Take parameters or groups of them.

        Args:
            params: parameters or groups of them, as for any torch optimizer.
            lr: learning rate.
            betas: decay of the two moments.
            eps: added to the root of the second moment.
            weight_decay: decoupled weight decay, multiplied by `lr` and applied after the update.
            correct_bias: whether to correct the bias of the moments in the first steps.
            no_deprecation_warning: accepted without effect, like the next two arguments.
            differentiable: steps are never recorded by autograd.
            capturable: steps are counted in tensors of the host.

        Raises:
            ValueError: a number is out of its range.
        """
        for name, given in {"differentiable": differentiable, "capturable": capturable}.items():
            if given:
                say_without_effect(name, f"{type(self).__name__} steps eagerly")
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        wrong = [f"{name}={number}" for name, number in numbers.items() if not number >= 0]
        wrong += [f"betas[{index}]={beta}" for index, beta in enumerate(betas) if not 0 <= beta < 1]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: lr, eps and weight_decay must be 0 or more, betas from 0 to below 1")
        super().__init__(params, {**numbers, "betas": betas, "correct_bias": correct_bias})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; moments stay float32, which torch's own method would convert to the parameters' dtype."""
        super().load_state_dict(state_dict)
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(ids, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        gradient, weights = parameter.grad.to(wide), parameter.to(wide)  # type: ignore[union-attr]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        rate = group["lr"]
        if group["correct_bias"]:
            steps = float(state["step"])
            rate = rate * (1 - second**steps) ** 0.5 / (1 - first**steps)
        weights = weights - rate * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        parameter.copy_(weights * (1 - group["lr"] * group["weight_decay"]))
