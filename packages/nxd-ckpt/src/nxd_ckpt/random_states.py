"""The states of a process's random generators, to save with a trainer's state: `PerRank(RandomStates())`."""

import random
from typing import Any

import numpy as np
import torch


class RandomStates:
    """The generators of Python, NumPy and torch in this process, on the CPU and its accelerator."""

    def state_dict(self) -> dict[str, Any]:
        """Return the current states."""
        version, numbers, gauss = random.getstate()
        numpy: Any = np.random.get_state(legacy=True)
        kind, keys, position, has_gauss, cached_gaussian = numpy
        states: dict[str, Any] = {
            "python": [version, list(numbers), gauss],
            "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(cached_gaussian)],
            "torch": torch.get_rng_state(),
        }
        if (accelerator := _accelerator()) is not None:
            states[accelerator] = torch.get_device_module(accelerator).get_rng_state()
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Set the generators; an accelerator's only if its state was saved on the same kind of accelerator."""
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, position, has_gauss, cached_gaussian = states["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian))
        torch.set_rng_state(states["torch"])
        accelerator = _accelerator()
        if accelerator is not None and accelerator in states:
            torch.get_device_module(accelerator).set_rng_state(states[accelerator])


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and torch.accelerator.is_available() else None
