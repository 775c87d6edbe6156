"""Whether an optimizer treats every element on its own, so that it may be given flat parts of parameters.

Found out by trying it, not by its name: any class is welcome that updates two parts as it updates the whole.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nxd_optim.zero1.settings import for_the_cpu

_SHAPE = (160, 144)  # some optimizers look at rows and columns of large matrices only
_CUT = 10_007
_STEPS = 3


def check_elementwise(optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> dict[str, Any]:
    """Take a few steps with a small matrix, whole and in two flat parts, and compare.

    Each part has an optimizer of its own, as it has on a rank, so that statistics over all parameters show as well.

    Returns:
        All defaults of the optimizer's parameter groups, also those that were not given.

    Raises:
        ValueError: the optimizer cannot be made or does not update the parts as it updates the whole.
    """
    # Made here for its complaints about arguments, before any of ours.
    complete = optimizer_class([{"params": [torch.zeros(1, 1)]}], **defaults).defaults
    settings = for_the_cpu(defaults)
    if "lr" in inspect.signature(optimizer_class).parameters:
        settings["lr"] = 0.01  # a warm-up may start at zero, which would hide every difference
    whole = torch.linspace(-1, 1, _SHAPE[0] * _SHAPE[1], dtype=torch.float64).cos().mul(0.1)
    advice = "give NeuronZero1Optimizer an elementwise one, such as AdamW, or use this one without it"
    try:
        with torch.random.fork_rng(devices=[]):
            expected = _train(optimizer_class, settings, [whole.view(_SHAPE).clone()])
        with torch.random.fork_rng(devices=[]):
            found = _train(optimizer_class, settings, list(whole.clone().tensor_split([_CUT])))
    except Exception as error:
        raise ValueError(
            f"{optimizer_class.__name__} cannot update flat parts of parameters: {type(error).__name__}: {error}; "
            f"{advice}"
        ) from error
    if not torch.allclose(found, expected, rtol=1e-6, atol=1e-12):
        raise ValueError(
            f"{optimizer_class.__name__} is not elementwise: it updates two flat parts of a matrix otherwise than the "
            f"whole matrix, so with ZeRO-1 the result would depend on the number of ranks; {advice}"
        )
    return complete


def _train(optimizer_class: type[Optimizer], settings: dict[str, Any], parts: list[Tensor]) -> Tensor:
    parameters = [torch.nn.Parameter(part) for part in parts]
    optimizers = []
    for parameter in parameters:  # a rank may own nothing of a group
        groups: list[dict[str, Any]] = [{"params": [parameter]}, {"params": []}]
        optimizers.append(optimizer_class(groups, **settings))
    for step in range(_STEPS):
        start = 0
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            positions = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
            parameter.grad = positions.mul(0.37 + step).sin().mul(positions.add(1).log()).view_as(parameter)
            start += parameter.numel()
            optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
