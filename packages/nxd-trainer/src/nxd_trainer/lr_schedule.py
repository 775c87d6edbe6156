"""The learning-rate schedule: linear warm-up, then a decay by its name in transformers.

It depends only on the step, so a resumed run needs no state for it. The formulas after the warm-up are those of
transformers, except that they fall to `min_lr_ratio` instead of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

LrScheduleName = Literal[
    "cosine",
    "linear",
    "constant",
    "warmup_stable_decay",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
]
DecayType = Literal["linear", "cosine", "1-sqrt"]

# The remaining part of the learning rate, given the completed part of the decay, from 0 to 1.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}
_NAMES: tuple[LrScheduleName, ...] = get_args(LrScheduleName)
_TIMESCALE = 10_000  # of inverse_sqrt without a warm-up, as in transformers


def lr_multiplier(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
    schedule: LrScheduleName = "cosine",
    num_decay_steps: int | None = None,
    decay_type: DecayType = "linear",
    num_cycles: int = 1,
    power: float = 1.0,
) -> float:
    """Return the factor of the base learning rate for one optimizer step.

    It rises linearly to 1 over the warm-up (the first step already moves), then falls to `min_lr_ratio` at
    `total_steps` and stays there; "constant" stays at 1, and "inverse_sqrt" falls as one over the root of the step.

    Args:
        step: optimizer steps already taken, 0 for the first step of the run.
        total_steps: steps of the whole run.
        warmup_steps: steps of warm-up; 0 starts at 1.
        min_lr_ratio: minimum factor after the warm-up, between 0 and 1.
        schedule: shape after the warm-up.
        num_decay_steps: number of steps of the decay at the end, for "warmup_stable_decay"; a tenth of the run if
            None.
        decay_type: shape of the decay of "warmup_stable_decay".
        num_cycles: number of cycles of "cosine_with_restarts".
        power: exponent of "polynomial".

    Raises:
        ValueError: an unknown schedule.
    """
    if schedule not in _NAMES:
        raise ValueError(f"schedule={schedule!r} is unknown; use {', '.join(_NAMES[:-1])} or {_NAMES[-1]}")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        timescale = warmup_steps or _TIMESCALE
        return max(min_lr_ratio, math.sqrt(timescale / (step + timescale - warmup_steps)))
    begin = warmup_steps
    if schedule == "warmup_stable_decay":
        num_decay_steps = max(1, total_steps // 10) if num_decay_steps is None else num_decay_steps
        begin = max(begin, total_steps - num_decay_steps)
    done = min(1.0, max(0, step - begin) / max(1, total_steps - begin))
    if schedule == "cosine_with_restarts":
        remaining = 0.0 if done == 1 else _DECAYS["cosine"](done * num_cycles % 1)
    elif schedule == "polynomial":
        remaining = (1 - done) ** power
    else:
        remaining = _DECAYS[decay_type if schedule == "warmup_stable_decay" else schedule](done)
    return min_lr_ratio + (1 - min_lr_ratio) * remaining
