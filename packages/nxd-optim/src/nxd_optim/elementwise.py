"""Checks whether an optimizer gives the same result for parts of parameters, or for some of the parameters.

If ranks hold parts of a matrix, the optimizer must treat every element separately. If ranks hold some of the matrices,
it must treat every matrix separately. Both are checked by a trial, not by name: any class works that updates two parts
like the whole.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SHAPE = (160, 144)  # some optimizers factorize only large matrices
_CUT = 10_007
_STEPS = 3
_ADVICE = "pass NeuronZero1Optimizer an elementwise one, such as AdamW, or use this one without it"


def check_elementwise(
    optimizer_class: type[Optimizer], defaults: Mapping[str, Any], *, advice: str = _ADVICE
) -> dict[str, Any]:
    """Take a few steps with a small matrix, whole and in two flat parts, and compare.

    Each part has its own optimizer, as on a rank, so that statistics over all parameters are detected too. A class with
    `joint_step`, such as `Muon` or `Adafactor`, is exact for parts of matrices and is not tried.

    Args:
        optimizer_class: the class to try.
        defaults: arguments of the class.
        advice: the remedy, for errors.

    Returns:
        All defaults of the optimizer's parameter groups, including those not given.

    Raises:
        ValueError: the optimizer cannot be created, or updates the parts differently from the whole.
    """
    # Created here so that its errors about arguments come before ours.
    complete = optimizer_class([{"params": [torch.zeros(1, 1)]}], **defaults).defaults
    if has_joint_step(optimizer_class):
        return complete
    settings, name = _settings(optimizer_class, defaults), optimizer_class.__name__
    whole = _values()
    try:
        expected = _train(optimizer_class, settings, [[whole.view(_SHAPE).clone()]])
        found = _train(optimizer_class, settings, [[part] for part in whole.clone().tensor_split([_CUT])])
    except Exception as error:
        raise ValueError(
            f"{name} cannot update flat parts of parameters: {type(error).__name__}: {error}; {advice}"
        ) from error
    if not torch.allclose(found, expected, rtol=1e-6, atol=1e-12):
        raise ValueError(
            f"{name} is not elementwise: it updates two parts of a matrix differently from the whole matrix, so the "
            f"result would depend on the number of ranks that hold parts; {advice}"
        )
    return complete


def check_parameterwise(optimizer_class: type[Optimizer], defaults: Mapping[str, Any], *, advice: str) -> None:
    """Take a few steps with two small matrices, in one optimizer and in one each, and compare.

    A class with `joint_step` is not tried.

    Args:
        optimizer_class: the class to try.
        defaults: arguments of the class.
        advice: the remedy, for errors.

    Raises:
        ValueError: the optimizer cannot be created, or combines all parameters.
    """
    if has_joint_step(optimizer_class):
        return
    settings = _settings(optimizer_class, defaults)
    rows = _SHAPE[0] // 4
    first, second = (part.clone() for part in _values().view(_SHAPE).split([rows, _SHAPE[0] - rows]))
    expected = _train(optimizer_class, settings, [[first.clone(), second.clone()]])
    found = _train(optimizer_class, settings, [[first], [second]])
    if not torch.allclose(found, expected, rtol=1e-6, atol=1e-12):
        raise ValueError(
            f"{optimizer_class.__name__} combines all parameters, so the result would depend on the number of ranks "
            f"that hold some of them; {advice}"
        )


def has_joint_step(optimizer_class: type[Optimizer]) -> bool:
    """Whether instances of an optimizer compute together what needs whole matrices; see `Muon.joint_step`."""
    return hasattr(optimizer_class, "joint_step")


def for_the_cpu(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's arguments for a trial on the CPU: without `capturable`, tensors as numbers."""
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in arguments.items()
        if key != "capturable"
    }


def _settings(optimizer_class: type[Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    settings = for_the_cpu(defaults)
    if "lr" in inspect.signature(optimizer_class).parameters:
        settings["lr"] = 0.01  # a warm-up may start at zero, which would hide every difference
    return settings


def _values() -> Tensor:
    return torch.linspace(-1, 1, _SHAPE[0] * _SHAPE[1], dtype=torch.float64).cos().mul(0.1)


def _train(optimizer_class: type[Optimizer], settings: dict[str, Any], ranks: Sequence[Sequence[Tensor]]) -> Tensor:
    """Train lists of tensors, each with its own optimizer, for some steps; returns all elements in order."""
    with torch.random.fork_rng(devices=[]):
        parameters = [[torch.nn.Parameter(part) for part in parts] for parts in ranks]
        optimizers = []
        for own in parameters:  # a rank may own no elements of a group
            groups: list[dict[str, Any]] = [{"params": own}, {"params": []}]
            optimizers.append(optimizer_class(groups, **settings))
        for step in range(_STEPS):
            start = 0
            for own, optimizer in zip(parameters, optimizers, strict=True):
                for parameter in own:
                    positions = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
                    values = positions.mul(0.37 + step).sin().mul(positions.add(1).log())
                    parameter.grad = values.view_as(parameter)
                    start += parameter.numel()
                optimizer.step()
        return torch.cat([parameter.detach().reshape(-1) for own in parameters for parameter in own])
