"""What `NeuronXLAStrategy` refuses, or warns of, since it would fail silently or on one rank."""

import warnings
from typing import Any

from nxd_engine import NxDModel, NxDOptimizer

from nxd_lightning.lightning_package import check_spelling
from nxd_lightning.module import TUTORIAL, NeuronLTModule

ENOUGH_BATCHES = 10  # for an optimizer step, as multiples of grad_accum_steps


def check_trainer(trainer: Any) -> None:
    """Refuse a Trainer's settings and parts that do not work on a mesh.

    Raises:
        TypeError: a callback or logger belongs to the other Lightning package, or the module is not a
            `NeuronLTModule`.
        ValueError: the Trainer would clip gradients.
    """
    for part in (*trainer.callbacks, *trainer.loggers):
        check_spelling(part)
    if not isinstance(trainer.lightning_module, NeuronLTModule):
        raise TypeError(
            f"{type(trainer.lightning_module).__name__} is not a NeuronLTModule, and NeuronXLAStrategy needs its model "
            f"and optimizer; inherit from NeuronLTModule ({TUTORIAL}), or pass the Trainer one of Lightning's own "
            "strategies"
        )
    if trainer.gradient_clip_val is not None:
        raise ValueError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) would clip each rank's part separately; set "
            'nxd_config["optimizer_config"]["max_grad_norm"] instead, which the optimizer uses'
        )


def check_model(module: NeuronLTModule) -> None:
    """Refuse a model that `__init__`, or an own `setup`, made without splitting it over the ranks.

    Raises:
        TypeError: `self.model` is there and no `NxDModel`.
    """
    model = getattr(module, "model", None)
    if not isinstance(model, NxDModel):
        found = "there is no self.model" if model is None else f"self.model is a {type(model).__name__}"
        raise TypeError(
            f"{found}, which nxd has not split over the ranks; pass the function that makes the model as model_fn "
            f"instead of setting self.model in __init__ ({TUTORIAL}), or make it in setup by "
            "nxd_engine.initialize_parallel_model"
        )


def check_optimizers(optimizers: list[Any]) -> None:
    """Refuse optimizers that would not average gradients over the ranks.

    Raises:
        ValueError: there are several, or one is not made for the mesh.
    """
    if len(optimizers) > 1 or not all(isinstance(optimizer, NxDOptimizer) for optimizer in optimizers):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"configure_optimizers returned {kinds}; return one optimizer of nxd_engine.initialize_parallel_optimizer("
            "self.nxd_config, torch.optim.AdamW, self.parameters(), lr=...), which averages gradients over the ranks"
        )


def warn_if_nothing_stepped(module: NeuronLTModule, batches: int) -> None:
    """Warn if the Trainer has run batches and its optimizer has taken no step, as the weights have not changed.

    Args:
        module: the module that is trained.
        batches: batches that this rank has run.
    """
    if batches and module.trainer.is_global_zero and _nothing_stepped(module):
        warnings.warn(_not_stepped(module, batches), stacklevel=2)


def refuse_if_nothing_stepped(module: NeuronLTModule, batches: int) -> None:
    """Refuse to begin another epoch after one that has changed nothing: `max_steps` would never be reached.

    Raises:
        RuntimeError: the batches so far would have been several steps, and there was none.
    """
    if batches >= ENOUGH_BATCHES * module.grad_accum_steps and _nothing_stepped(module):
        raise RuntimeError(_not_stepped(module, batches))


def _nothing_stepped(module: NeuronLTModule) -> bool:
    return not module.automatic_optimization and not any(it.num_steps for it in module.trainer.strategy.optimizers)


def _not_stepped(module: NeuronLTModule, batches: int) -> str:
    return (
        f"{type(module).__name__}.training_step has run {batches} batches, and nothing has stepped the optimizer so "
        "far: the weights are as they were, and max_steps is never reached like this. Pass manual_opt=False to "
        "NeuronLTModule, so that the Trainer steps it, or call self.optimizers().step() in training_step"
    )
