"""What `NeuronXLAStrategy` refuses, or warns of, since it would fail silently or on one rank."""

import warnings
from typing import Any

from nxd_engine import NxDModel, NxDOptimizer

from nxd_lightning.lightning_package import check_spelling
from nxd_lightning.module import NeuronLTModule

TUTORIAL = "the page Train a Lightning module on two ranks shows how"


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
            "nxd.initialize_parallel_model"
        )


def check_optimizers(optimizers: list[Any]) -> None:
    """Refuse optimizers that would not average gradients over the ranks.

    Raises:
        ValueError: there are several, or one is not made for the mesh.
    """
    if len(optimizers) > 1 or not all(isinstance(optimizer, NxDOptimizer) for optimizer in optimizers):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"configure_optimizers returned {kinds}; return one optimizer of "
            "nxd.initialize_parallel_optimizer(self.nxd_config, torch.optim.AdamW, self.model.parameters(), lr=...), "
            "which averages gradients over the ranks"
        )


def warn_if_nothing_stepped(module: NeuronLTModule, batches: int) -> None:
    """Warn if the Trainer has run batches and its optimizer has taken no step, as the weights have not changed.

    Args:
        module: the module that is trained.
        batches: batches that this rank has run.
    """
    if module.automatic_optimization or module.trainer.global_step or not batches or not module.trainer.is_global_zero:
        return
    warnings.warn(
        f"{type(module).__name__}.training_step has run {batches} batches, and nothing has stepped the optimizer: the "
        "weights are as they were. Pass manual_opt=False to NeuronLTModule, so that the Trainer steps it, or call "
        "self.optimizers().step() in training_step",
        stacklevel=2,
    )
