"""What an `accelerate.Accelerator` has, as a state for `save`, `async_save` and `load`.

    save("runs", "step-10", accelerator_state(accelerator), step=10)
    load("runs", into=accelerator_state(accelerator))

Nothing of Accelerate is imported here.
"""

from typing import Any

from nxd_ckpt.random_states import RandomStates
from nxd_ckpt.training_state import PerRank


def accelerator_state(accelerator: Any) -> dict[str, Any]:
    """What was given to `accelerator.prepare` and `register_for_checkpointing`, and the random generators.

    As `accelerator.save_state` would save it, but for any number of ranks. A single model is named `model`, several are
    `models.0`, `models.1`; so are optimizers, schedulers and data loaders. Data loaders count if they have a
    `state_dict`, as those that `use_stateful_dataloader` makes.

    Args:
        accelerator: after `prepare`.
    """
    schedulers = [getattr(scheduler, "scheduler", scheduler) for scheduler in accelerator._schedulers]
    loaders = [PerRank(loader) for loader in accelerator._dataloaders if hasattr(loader, "state_dict")]
    parts = {
        "model": list(accelerator._models),
        "optimizer": [optimizer.optimizer for optimizer in accelerator._optimizers],
        "scheduler": schedulers,
        "dataloader": loaders,
        "object": list(accelerator._custom_objects),
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
    }
    state: dict[str, Any] = {"random": PerRank(RandomStates())}
    for name, found in parts.items():
        if len(found) == 1:
            state[name] = found[0]
        elif found:
            state[f"{name}s"] = found
    return state
