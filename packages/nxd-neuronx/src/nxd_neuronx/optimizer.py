"""AdamW with float32 moments; norm, clipping and averaging of gradients with the arguments of NeuronX Distributed."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from nxd_optim import grad_norm
from nxd_state import Group, all_reduce, all_reduce_, get_group, group_among
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
        """Create the optimizer.

        Args:
            params: parameters or parameter groups.
            lr: learning rate.
            betas: decay rates of the two moments.
            eps: constant added to the root of the second moment.
            weight_decay: decoupled weight decay, multiplied by `lr` and applied after the update.
            correct_bias: whether to correct the bias of the moments in the first steps.
            no_deprecation_warning: accepted without effect, like `differentiable` and `capturable`.
            differentiable: see above.
            capturable: see above.

        Raises:
            ValueError: a number is out of range.
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
        """Load a state; moments stay float32, where torch's own method converts them to the parameters' dtype."""
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


def get_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    norm_type: float | str = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Sequence[Sequence[int]] | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """Return the p-norm of the whole model's gradients, the same on every rank. Called by all ranks of the model.

    Args:
        parameters: this rank's parameters.
        norm_type: p > 0, or inf.
        zero1_optimizer: whether gradients are sharded over the replicas, whose norms are then combined.
        zero1_optimizer_groups: ranks of the groups to combine, instead of all replicas.
        force_spmd: accepted without effect; each element always counts once.

    Raises:
        ValueError: groups without `zero1_optimizer`, or a `norm_type` that is not positive.
    """
    if zero1_optimizer_groups is not None and not zero1_optimizer:
        raise ValueError("zero1_optimizer_groups need zero1_optimizer=True; set it, or remove them")
    norm = grad_norm(parameters, norm_type)
    if not zero1_optimizer:
        return norm
    group = get_group("dp") if zero1_optimizer_groups is None else group_among(zero1_optimizer_groups)
    return _combined(norm, float(norm_type), group)


def _combined(norm: Tensor, power: float, group: Group) -> Tensor:
    if math.isinf(power):
        return all_reduce(norm, group, op="max")
    return all_reduce(norm.pow(power), group).pow(1 / power)


def clip_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float | str = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Sequence[Sequence[int]] | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """Clip the gradients of the whole model to a norm of at most `max_norm`; returns the norm before clipping.

    See `get_grad_norm` for the other arguments. A negative `max_norm` raises a ValueError.
    """
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm={max_norm} must be zero or more")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = get_grad_norm(listed, norm_type, zero1_optimizer, zero1_optimizer_groups, force_spmd)
    clip_grads_with_norm(listed, norm, max_norm)
    return norm


@torch.no_grad()
def clip_grads_with_norm(parameters: Iterable[Tensor], total_norm: Tensor, max_norm: float) -> Tensor:
    """Scale the gradients by `max_norm / (total_norm + 1e-6)` where that is below 1; returns `total_norm`."""
    scale = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
    for parameter in dict.fromkeys(parameters):
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))
    return total_norm


@torch.no_grad()
def bucket_allreduce_gradients(grads_list: Iterable[Tensor], reduce_over_ep_group: bool = False) -> None:
    """Average gradients over the replicas in place, with one message per dtype.

    With expert parallelism, the average is over the replicas of each expert; gradients of weights outside the experts
    must be passed once more with `reduce_over_ep_group`, which only sums.

    Args:
        grads_list: gradients, in the same order on every replica.
        reduce_over_ep_group: whether to sum over the expert-parallel ranks instead.
    """
    has_experts = get_group("ep").size > 1
    group = get_group("ep" if reduce_over_ep_group else "dp_exp" if has_experts else "dp")
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in grads_list:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce_(flat, group, op="sum" if reduce_over_ep_group or has_experts else "avg")
        if has_experts and not reduce_over_ep_group:
            flat /= get_group("dp").size
        for gradient, values in zip(gradients, flat.split([it.numel() for it in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))
