"""A recipe's optimizer: its class, its arguments, and which parameters it decays.

`nxd train` and `nxd parity` use this module. An optimizer whose update of an element depends on others is refused if
those are split over ranks, since its result would depend on the layout.
"""

import inspect
from typing import Any

import torch
from nxd_cli.command import import_named
from nxd_engine import NxDModel, NxDOptimizer, initialize_parallel_optimizer
from nxd_optim import Adafactor, Muon, check_elementwise, check_parameterwise, muon_parameter_groups
from nxd_state import get_device, has_fused_optimizers, is_lazy_device
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from nxd_trainer.lr_schedule import lr_multiplier
from nxd_trainer.recipe import Recipe
from nxd_trainer.recipe.sections import OptimizerSection

_TYPES: dict[str, type[Optimizer]] = {"adamw": AdamW, "muon": Muon, "sgd": SGD, "adafactor": Adafactor}


def build_optimizer(recipe: Recipe, model: NxDModel) -> NxDOptimizer:
    """Build the optimizer that a recipe names, for a model's trainable parameters. Call it on all ranks.

    Raises:
        ValueError: there is no such optimizer, its arguments are wrong, or it is not exact at this layout.
    """
    device, cls = get_device(), optimizer_class(recipe)
    arguments = optimizer_arguments(recipe)
    check_is_exact(recipe, cls, arguments)
    # On XLA the step count is data too; otherwise bias corrections that reach 1 would change the graph.
    if cls is AdamW and is_lazy_device(device):
        arguments = {"capturable": True, **arguments}
    elif cls in (AdamW, SGD, Muon) and "foreach" not in arguments:
        arguments = {"fused": has_fused_optimizers(device), **arguments}
    return initialize_parallel_optimizer(model.nxd_config, cls, parameter_groups(recipe, model), **arguments)


def optimizer_class(recipe: Recipe) -> type[Optimizer]:
    """Return the class that `optimizer.type` or `optimizer.factory` names.

    Raises:
        ValueError: the factory cannot be imported, or is not a torch optimizer class.
    """
    name = recipe.optimizer.factory
    if name is None:
        return _TYPES[recipe.optimizer.type]
    found = import_named(name, "optimizer.factory")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ValueError(
            f"optimizer.factory={name} is not a torch optimizer class; give one, such as torch.optim:NAdam"
        )
    return found


def optimizer_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the optimizer's arguments for all parameters; raises ValueError if the class does not accept them."""
    options, cls = recipe.optimizer, optimizer_class(recipe)
    arguments: dict[str, Any] = {"lr": options.lr}
    if cls is AdamW:
        arguments |= {"betas": options.betas, "eps": options.eps}
    if cls is Muon:  # one learning rate and schedule for both of its algorithms
        arguments |= {"betas": options.betas, "adamw_eps": options.eps, "adjust_lr_fn": "match_rms_adamw"}
    arguments |= {name: tuple(it) if isinstance(it, list) else it for name, it in (options.config or {}).items()}
    try:
        inspect.signature(cls).bind([], **arguments)
        cls([{"params": [torch.zeros(1, 1)]}], **arguments)
    except Exception as error:  # classes raise many types for bad arguments
        shown = {name: it for name, it in arguments.items() if name != "lr"}
        raise ValueError(f"{_named(recipe)} does not take optimizer.config={shown}: {error}") from error
    return arguments


def parameter_groups(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups that decay matrices but not norms and biases; for Muon also by role."""
    weight_decay = recipe.optimizer.weight_decay
    if optimizer_class(recipe) is Muon:
        return muon_parameter_groups(model, weight_decay)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def check_is_exact(recipe: Recipe, cls: type[Optimizer], arguments: dict[str, Any]) -> None:
    """Check that an optimizer computes the same at a recipe's layout as in one process.

    Raises:
        ValueError: it needs whole matrices but ranks hold parts, or all parameters but ranks hold some; or the device
            does not support it.
    """
    parallel, or_use = recipe.parallel, "or use adamw, adafactor or sgd"
    if cls is Muon and is_lazy_device():
        raise ValueError(f"{_named(recipe)} does not support XLA, where no rank may gather matrices; use adamw")
    if cls in (Muon, Adafactor) and parallel.zero_offload != "none":
        text = "computes with whole matrices on the device; set parallel.zero_offload=none, or use adamw"
        raise ValueError(f"{_named(recipe)} {text}")
    splits = parallel.zero_stage or parallel.tensor_parallel_size > 1 or parallel.degrees.splits_experts
    if cls is Adafactor and is_lazy_device() and splits:
        raise ValueError(f"{_named(recipe)} does not support XLA where ranks hold parts of matrices; use adamw")
    try:
        if parallel.zero_stage:
            check_elementwise(cls, arguments, advice=f"set parallel.zero_stage=0, {or_use}")
        if parallel.tensor_parallel_size > 1:
            check_elementwise(cls, arguments, advice=f"set parallel.tensor_parallel_size=1, {or_use}")
        if parallel.degrees.splits_experts:
            check_elementwise(cls, arguments, advice=f"set parallel.expert_parallel_size=1, {or_use}")
        if parallel.pipeline_parallel_size > 1:
            check_parameterwise(cls, arguments, advice=f"set parallel.pipeline_parallel_size=1, {or_use}")
    except ValueError as error:
        raise ValueError(f"{_named(recipe)}: {error}") from error


def scheduled_rate(options: OptimizerSection, step: int, *, total_steps: int) -> float:
    """Return the learning rate of one optimizer step of a run.

    Args:
        options: the recipe's section of the optimizer.
        step: optimizer steps already taken.
        total_steps: steps of the whole run.
    """
    return options.lr * lr_multiplier(
        step,
        total_steps=total_steps,
        warmup_steps=options.warmup_steps,
        min_lr_ratio=options.min_lr_ratio,
        schedule=options.schedule,
        num_decay_steps=options.num_decay_steps,
        decay_type=options.decay_type,
        num_cycles=options.num_cycles,
        power=options.power,
    )


def learning_rate_on(device: torch.device, rate: float) -> float | Tensor:
    """Return a learning rate for the optimizer: on XLA a 0-d tensor, so that all steps share one graph."""
    # Made as [1], since torch-xla treats the scalars 0 and 1 as constants.
    return torch.tensor([rate], device=device).view(()) if is_lazy_device(device) else rate


def _named(recipe: Recipe) -> str:
    options = recipe.optimizer
    return f"optimizer.type={options.type}" if options.factory is None else f"optimizer.factory={options.factory}"
