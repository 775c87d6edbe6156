"""The learning-rate schedule: linear warm-up, then cosine, linear or no decay: a pure function of the step.

The schedule depends only on the step, so a resumed run needs no state for it.
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def lr_multiplier(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
    schedule: Schedule = "cosine",
) -> float:
    """The factor of the base learning rate in one optimizer step.

    Rises linearly to 1 over the warm-up (the first step already moves), then falls to `min_lr_ratio` at
    `total_steps` and stays there; "constant" stays at 1.

    Args:
        step: optimizer steps already taken: 0 for the first step of the run.
        total_steps: steps of the whole run.
        warmup_steps: steps of warm-up; 0 starts at 1.
        min_lr_ratio: multiplier at the end, between 0 and 1.
        schedule: shape of the decay after the warm-up.

    Raises:
        ValueError: an unknown schedule.
    """
    if schedule not in ("cosine", "linear", "constant"):
        raise ValueError(f"schedule={schedule!r} is unknown; use cosine, linear or constant")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    decayed = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = (1 + math.cos(math.pi * decayed)) / 2 if schedule == "cosine" else 1 - decayed
    return min_lr_ratio + (1 - min_lr_ratio) * remaining
