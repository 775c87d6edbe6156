"""Stochastic rounding: training bfloat16 weights without a float32 copy of them.

Rounding to nearest loses every update smaller than half a unit in the last of bfloat16's 8 bits. Rounding up with a
probability equal to the part that is cut off keeps such updates on average (Gupta et al. 2015, "Deep Learning with
Limited Numerical Precision"; Zamirai et al. 2020, "Revisiting BFloat16 Training").
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from nxd_state import Box
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nxd_optim.elementwise import has_joint_step
from nxd_optim.flat_shards import shards_of_range
from nxd_optim.zero import NeuronZero1Optimizer

_NOISE_BITS = 16  # of float32's 32 bits, those that bfloat16 lacks


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
    shape, device = values.shape, values.device
    noise = torch.randint(0, 1 << _NOISE_BITS, shape, dtype=torch.int32, device=device, generator=generator)
    return _round_with(values, noise)


def _round_with(values: Tensor, noise: Tensor) -> Tensor:
    # bfloat16 is the upper half of float32's bits: noise added to the lower half carries with the right probability.
    bits = values.contiguous().view(torch.int32)
    rounded = ((bits + noise) & -(1 << _NOISE_BITS)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _noise_of_box(key: str, logical_shape: tuple[int, ...], box: Box, device: torch.device) -> Tensor:
    """Return the noise of a box of a logical tensor, of the box's shape: a hash of the key and each position."""
    positions = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(logical_shape))):
        along = torch.arange(box.shape[dim], device=device) + box.offset[dim]
        positions = positions + (along * stride).view(-1, *[1] * (len(logical_shape) - 1 - dim))
        stride *= logical_shape[dim]
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    # The finalizer of MurmurHash3, on 64 bits; shifts are made logical by masks.
    mixed = positions + int.from_bytes(digest, "little", signed=True)
    for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):
        mixed = (mixed ^ ((mixed >> 33) & 0x7FFFFFFF)) * factor
    return ((mixed >> 33) & ((1 << _NOISE_BITS) - 1)).to(torch.int32)


def _noise_of_range(parameter: Tensor, start: int, stop: int, key: str, like: Tensor) -> Tensor:
    """Return noise for elements `start:stop`, of a tensor's shape, equal for equal logical elements at any layout."""
    flat = torch.zeros(like.numel(), dtype=torch.int32, device=like.device)
    for shard in shards_of_range(parameter, start, stop, flat[: stop - start]):
        name = f"{key}/{shard.name}" if shard.name else key
        shard.tensor.copy_(_noise_of_box(name, shard.logical_shape, shard.box, flat.device))
    return flat.view(like.shape)


class StochasticRounding:
    """Makes an optimizer update its bfloat16 parameters in float32 and round the result stochastically.

    Parameters of other dtypes are not affected. The optimizer's state becomes float32. During `step`, a float32 copy of
    the parameters exists (with ZeRO, of this rank's part of a bucket).

    The noise of an element depends only on `seed`, the number of the step, the parameter's name and the element's
    position in the logical tensor. So equal updates are rounded alike at any layout, and replicas and copies of a
    weight on other ranks stay bitwise equal.

    Args:
        optimizer: any torch optimizer. A `NeuronZero1Optimizer` must have been created with
            `optimizer_dtype=torch.bfloat16`, and have all its parameter groups.
        seed: the random seed, the same on every rank.
        names: the names of the parameters in the whole model; parameters without a name share one sequence of noise.

    Raises:
        ValueError: a `NeuronZero1Optimizer` that keeps master weights, which need no such rounding, or one of `Muon`
            or `Adafactor`.
    """

    def __init__(self, optimizer: Optimizer, *, seed: int = 0, names: Mapping[Tensor, str] | None = None) -> None:
        self.seed = seed
        self.steps = 0
        self._names = dict(names or {})
        self._rounded: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its bfloat16 data and gradient
        self._loading: dict[str, Any] = {}
        # With ZeRO: of which parameter's elements each updated weight consists.
        parts = optimizer.parts() if isinstance(optimizer, NeuronZero1Optimizer) else ()
        ranges = [own for bucket, _ in parts for own in bucket.ranges]
        self._ranges: dict[Tensor, tuple[Tensor, int, int]] = {
            own.weight: (own.parameter, own.start, own.stop) for own in ranges
        }
        self._hooks = [hook for each in _updating_optimizers(optimizer) for hook in self._attach(each)]
        self._hooks.append(optimizer.register_step_pre_hook(self._count))

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

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1

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
        for parameter, data, grad in self._rounded:
            whole, start, stop = self._ranges.get(parameter, (parameter, 0, parameter.numel()))
            key = f"{self.seed}/{self.steps}/{self._names.get(whole, '')}"
            data.copy_(_round_with(parameter.data, _noise_of_range(whole, start, stop, key, data)))
            parameter.grad = None
            parameter.data = data
            parameter.grad = grad
        self._rounded = []


def _updating_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that update weights: with ZeRO, one for each bucket."""
    if not isinstance(optimizer, NeuronZero1Optimizer):
        return [optimizer]
    if optimizer.optimizer_dtype != torch.bfloat16:
        raise ValueError(
            f"NeuronZero1Optimizer with optimizer_dtype={optimizer.optimizer_dtype} updates master weights, which are "
            "not rounded; create it with optimizer_dtype=torch.bfloat16, or do not use stochastic rounding"
        )
    if has_joint_step(optimizer.optimizer_class):
        raise ValueError(
            f"{optimizer.optimizer_class.__name__} updates its states before the steps of ZeRO's buckets, which alone "
            "are rounded stochastically; use master weights, or AdamW"
        )
    return [base for _, base in optimizer.parts()]
