"""Whether an optimizer may be given parts of parameters, or some of the parameters, with the same result.

Where ranks hold parts of a matrix, an optimizer must treat every element on its own. Where ranks hold some of the
matrices, it must treat every matrix on its own. Both are checked by trying it, not by its name: any class works that
updates two parts as it updates the whole.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SHAPE = (160, 144)  # some optimizers look at rows and columns of large matrices only
_CUT = 10_007
_STEPS = 3
_ADVICE = "give NeuronZero1Optimizer an elementwise one, such as AdamW, or use this one without it"


def check_elementwise(
    optimizer_class: type[Optimizer], defaults: Mapping[str, Any], *, advice: str = _ADVICE
) -> dict[str, Any]:
    """Take a few steps with a small matrix, whole and in two flat parts, and compare.

    Each part has an optimizer of its own, as it has on a rank, so that statistics over all parameters show as well.

    Args:
        optimizer_class: to be tried.
        defaults: its arguments.
        advice: what an error says to do instead.

    Returns:
        All defaults of the optimizer's parameter groups, also those that were not given.

    Raises:
        ValueError: the optimizer cannot be made or does not update the parts as it updates the whole.
    """
    # Made here so that its errors about arguments come before ours.
    complete = optimizer_class([{"params": [torch.zeros(1, 1)]}], **defaults).defaults
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
            f"{name} is not elementwise: it updates two parts of a matrix otherwise than the whole matrix, so the "
            f"result would depend on the number of ranks that have parts; {advice}"
        )
    return complete


def check_parameterwise(optimizer_class: type[Optimizer], defaults: Mapping[str, Any], *, advice: str) -> None:
    """Take a few steps with two small matrices, in one optimizer and in one each, and compare.

    Args:
        optimizer_class: to be tried.
        defaults: its arguments.
        advice: what an error says to do instead.

    Raises:
        ValueError: the optimizer cannot be made or looks at all parameters together.
    """
    settings = _settings(optimizer_class, defaults)
    rows = _SHAPE[0] // 4
    first, second = (part.clone() for part in _values().view(_SHAPE).split([rows, _SHAPE[0] - rows]))
    expected = _train(optimizer_class, settings, [[first.clone(), second.clone()]])
    found = _train(optimizer_class, settings, [[first], [second]])
    if not torch.allclose(found, expected, rtol=1e-6, atol=1e-12):
        raise ValueError(
            f"{optimizer_class.__name__} looks at all parameters together, so the result would depend on the number of "
            f"ranks that have some of them; {advice}"
        )


def for_the_cpu(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's arguments for the CPU, where optimizers are tried: no `capturable`, tensors as numbers."""
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
    """What some steps make of tensors, each list of them in an optimizer of its own: all elements, in their order."""
    with torch.random.fork_rng(devices=[]):
        parameters = [[torch.nn.Parameter(part) for part in parts] for parts in ranks]
        optimizers = []
        for own in parameters:  # a rank may own nothing of a group
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
