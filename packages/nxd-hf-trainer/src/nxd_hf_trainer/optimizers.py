"""A script's optimizer becomes an `NxDOptimizer` of the same class, with the same groups and settings."""

import inspect
from types import MethodType
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from nxd_engine import NxDOptimizer, initialize_parallel_optimizer
from nxd_state import all_ranks, get_group
from torch import Tensor
from torch.optim import Optimizer

from nxd_hf_trainer.models import SplitModels


def parallel_optimizer(optimizer: Optimizer, models: SplitModels) -> NxDOptimizer:
    """Return the parallel optimizer of the models whose parameters an optimizer has. Called by all ranks.

    The given optimizer then shows the groups of the parallel one: schedulers that have it, prepared or not, set the
    learning rates of both.

    Raises:
        ValueError: it has taken a step, or parameters of no prepared model, or its class cannot be made anew.
    """
    if isinstance(optimizer, NxDOptimizer):
        return optimizer
    kind = type(optimizer)
    if optimizer.state:
        raise ValueError(
            f"the {kind.__name__} has states already; pass it to Accelerator.prepare before its first step"
        )
    trained = models.models_of(it for group in optimizer.param_groups for it in group["params"])
    parameters = {id(model): dict(model.named_parameters(remove_duplicate=False)) for model in trained}
    for group in optimizer.param_groups:
        group["params"] = _here(group["params"], parameters, models)
    accepted = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    with all_ranks():
        made = initialize_parallel_optimizer(
            models.config, kind, [dict(it) for it in optimizer.param_groups], **settings
        )
    _stand_in(optimizer, made)
    if get_group("pp").size > 1:
        own_step = made.step

        def step(optimizer: NxDOptimizer, closure: Any = None) -> Any:
            models.finish_backward()  # of a script that calls `loss.backward()` itself
            return own_step(closure)

        own_zero_grad = made.zero_grad

        def zero_grad(optimizer: NxDOptimizer, set_to_none: bool = True) -> None:
            models.forget_backward(trained)
            own_zero_grad(set_to_none)

        made.step = MethodType(step, made)  # type: ignore[method-assign]
        made.zero_grad = MethodType(zero_grad, made)  # type: ignore[method-assign]
    for model in trained:
        model.zero_grad = made.zero_grad  # type: ignore[method-assign]  # what Trainer calls after each step
    return made


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate has wrapped."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _stand_in(before: Optimizer, after: NxDOptimizer) -> None:
    """Let an optimizer show the groups of the one that replaces it, for schedulers that were made for it."""
    kind = type(before)
    before.__class__ = type(kind.__name__, (kind,), {"param_groups": property(lambda _: after.param_groups)})


def _here(given: list[Tensor], parameters: dict[int, dict[str, Any]], models: SplitModels) -> list[Tensor]:
    """Return this rank's parameters in place of those that were given."""
    found: dict[int, Tensor] = {}
    for it in given:
        place = models.place_of(it)
        if place is None:
            raise ValueError(
                f"the optimizer has a parameter of shape {list(it.shape)} that is in no model given to "
                "Accelerator.prepare; prepare its model first, or both in one call"
            )
        model, name = place
        if name in parameters[id(model)]:  # else another pipeline stage has it
            parameter = parameters[id(model)][name]
            found[id(parameter)] = parameter
    return list(found.values())
