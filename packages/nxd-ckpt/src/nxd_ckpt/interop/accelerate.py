"""The state of an `accelerate.Accelerator`, for `save`, `async_save` and `load`.

    save("runs", "step-10", accelerator_state(accelerator), step=10)
    load("runs", into=accelerator_state(accelerator))

This module does not import Accelerate.
"""

from typing import Any

from nxd_ckpt.random_states import RandomStates
from nxd_ckpt.training_state import PerRank


class _Step:
    """The number of gradient accumulation steps so far."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]


def accelerator_state(accelerator: Any) -> dict[str, Any]:
    """Return the objects passed to `accelerator.prepare` and `register_for_checkpointing`, the RNG states and the step.

    This is the state that `accelerator.save_state` saves, but for any number of ranks. A single model is named `model`,
    several are `models.0`, `models.1`; optimizers, schedulers and data loaders likewise. Data loaders are included if
    created with `use_stateful_dataloader`; the position of others is lost, as with `save_state`.

    Args:
        accelerator: the accelerator, after `prepare`.
    """
    schedulers = [getattr(scheduler, "scheduler", scheduler) for scheduler in accelerator._schedulers]
    stateful = [it for it in accelerator._dataloaders if getattr(it, "use_stateful_dataloader", False)]
    loaders = [PerRank(loader) for loader in stateful]
    parts = {
        "model": list(accelerator._models),
        "optimizer": [optimizer.optimizer for optimizer in accelerator._optimizers],
        "scheduler": schedulers,
        "dataloader": loaders,
        "object": list(accelerator._custom_objects),
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
    }
    state: dict[str, Any] = {"random": PerRank(RandomStates()), "accelerator": _Step(accelerator)}
    for name, found in parts.items():
        if len(found) == 1:
            state[name] = found[0]
        elif found:
            state[f"{name}s"] = found
    return state
