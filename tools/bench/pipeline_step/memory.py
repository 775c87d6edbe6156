"""What a step holds in memory, as torch's profiler sees each tensor come and go."""

from collections.abc import Callable

import torch


def held_bytes(step: Callable[[], object]) -> int:
    """The most that a step holds at any time beyond what it found: activations, messages and temporaries."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None  # it has run
    results = profile.profiler.kineto_results
    changes = sorted((it.start_ns(), it.nbytes()) for it in results.events() if it.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
