"""Refuses settings that a Trainer with `NeuronXLAStrategy` cannot run: they would fail silently, or on one rank."""

from typing import Any

from nxd_engine import NxDOptimizer

from nxd_lightning.lightning_package import check_spelling
from nxd_lightning.module import NeuronLTModule


def check_trainer(trainer: Any) -> None:
    """Raise if the strategy does not support the Trainer's settings.

    Raises:
        TypeError: a callback or logger belongs to the other Lightning package, or the module is not a `NeuronLTModule`.
        ValueError: the Trainer would clip gradients.
    """
    for part in (*trainer.callbacks, *trainer.loggers):
        check_spelling(part)
    if not isinstance(trainer.lightning_module, NeuronLTModule):
        raise TypeError(
            f"{type(trainer.lightning_module).__name__} is not a NeuronLTModule, and NeuronXLAStrategy needs its model "
            "and optimizer; inherit from NeuronLTModule, or pass the Trainer one of Lightning's own strategies"
        )
    if trainer.gradient_clip_val is not None:
        raise ValueError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) would clip each rank's part separately; set "
            'nxd_config["optimizer_config"]["max_grad_norm"] instead, which the optimizer uses'
        )


def check_optimizers(optimizers: list[Any]) -> None:
    """Raise unless there is at most one optimizer, made for the mesh.

    Raises:
        ValueError: there are several, or one of another class.
    """
    if len(optimizers) > 1 or not all(isinstance(optimizer, NxDOptimizer) for optimizer in optimizers):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"configure_optimizers returned {kinds}; return one optimizer of initialize_parallel_optimizer, which "
            "averages gradients over the ranks"
        )
