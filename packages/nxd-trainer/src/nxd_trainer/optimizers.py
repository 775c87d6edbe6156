"""A recipe's optimizer: its class, its arguments, and which parameters it decays.

`nxd train` and `nxd parity` use this module. An optimizer that looks at more than one element is refused where the
ranks hold parts of what it looks at, since its result would depend on the layout.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from nxd_cli.command import import_named
from nxd_engine import NxDModel, NxDOptimizer, initialize_parallel_optimizer
from nxd_optim import check_elementwise, check_parameterwise
from nxd_state import get_device, has_fused_optimizers, records_graphs
from torch import Tensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from nxd_trainer.recipe import Recipe

_TYPES: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD, "adafactor": Adafactor}


def build_optimizer(recipe: Recipe, model: NxDModel) -> NxDOptimizer:
    """The optimizer that a recipe names, for the parameters of a model that train. By all ranks.

    Raises:
        ValueError: there is no such optimizer, its arguments are wrong, or it is not exact at this layout.
    """
    device, cls = get_device(), optimizer_class(recipe)
    arguments = optimizer_arguments(recipe)
    check_is_exact(recipe, cls, arguments)
    # On XLA the count of steps, too, is data; bias corrections that have become 1 would make another graph.
    if cls is AdamW and records_graphs(device):
        arguments = {"capturable": True, **arguments}
    elif cls in (AdamW, SGD) and "foreach" not in arguments:
        arguments = {"fused": has_fused_optimizers(device), **arguments}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return initialize_parallel_optimizer(model.nxd_config, cls, parameter_groups(recipe, trained), **arguments)


def optimizer_class(recipe: Recipe) -> type[Optimizer]:
    """The class that `optimizer.type` or `optimizer.factory` names.

    Raises:
        ValueError: the factory cannot be imported, or is no class of torch optimizers.
    """
    name = recipe.optimizer.factory
    if name is None:
        return _TYPES[recipe.optimizer.type]
    found = import_named(name, "optimizer.factory")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ValueError(
            f"optimizer.factory={name} is no class of torch optimizers; give one, such as torch.optim:NAdam"
        )
    return found


def optimizer_arguments(recipe: Recipe) -> dict[str, Any]:
    """Arguments of the class that hold for all parameters.

    Raises:
        ValueError: the class does not take them.
    """
    options, cls = recipe.optimizer, optimizer_class(recipe)
    arguments: dict[str, Any] = {"lr": options.lr}
    if cls is AdamW:
        arguments |= {"betas": options.betas, "eps": options.eps}
    arguments |= {name: tuple(it) if isinstance(it, list) else it for name, it in (options.config or {}).items()}
    try:
        inspect.signature(cls).bind([], **arguments)
        cls([{"params": [torch.zeros(1, 1)]}], **arguments)
    except Exception as error:  # whatever a class says of its arguments
        shown = {name: it for name, it in arguments.items() if name != "lr"}
        raise ValueError(f"{_named(recipe)} does not take optimizer.config={shown}: {error}") from error
    return arguments


def parameter_groups(recipe: Recipe, parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Groups for an optimizer that decays matrices and leaves norms alone."""
    trained = list(parameters)
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": recipe.optimizer.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def check_is_exact(recipe: Recipe, cls: type[Optimizer], arguments: dict[str, Any]) -> None:
    """Check that an optimizer computes at a recipe's layout what it computes in one process.

    Raises:
        ValueError: it looks at whole matrices where ranks hold parts, or at all parameters where ranks hold some.
    """
    parallel, or_use = recipe.parallel, "or use adamw or sgd"
    try:
        if parallel.zero1:
            check_elementwise(cls, arguments, advice=f"set parallel.zero1=false, {or_use}")
        if parallel.tensor_parallel_size > 1:
            check_elementwise(cls, arguments, advice=f"set parallel.tensor_parallel_size=1, {or_use}")
        if parallel.degrees.splits_experts:
            check_elementwise(cls, arguments, advice=f"set parallel.expert_parallel_size=1, {or_use}")
        if parallel.pipeline_parallel_size > 1:
            check_parameterwise(cls, arguments, advice=f"set parallel.pipeline_parallel_size=1, {or_use}")
    except ValueError as error:
        raise ValueError(f"{_named(recipe)}: {error}") from error


def learning_rate_on(device: torch.device, rate: float) -> float | Tensor:
    """A learning rate as an optimizer takes it: on XLA as data, 0-d, so that a schedule's steps are one graph."""
    # Made as [1], since torch-xla takes the scalars 0 and 1 for constants.
    return torch.tensor([rate], device=device).view(()) if records_graphs(device) else rate


def _named(recipe: Recipe) -> str:
    options = recipe.optimizer
    return f"optimizer.type={options.type}" if options.factory is None else f"optimizer.factory={options.factory}"
