"""`generate()` of a split model: all tensor-parallel ranks draw the same tokens, and so stop at the same time."""

from functools import partial
from typing import Any

from nxd_state import active_group, broadcast, get_rng_state, set_rng_state, transport_device
from nxd_state.rng import SHARED_STREAM
from torch import nn


def draw_alike(model: nn.Module) -> None:
    """Have `generate()` begin with the random numbers of the first rank on all of them, however they are seeded."""
    if hasattr(model, "generate"):
        model.generate = partial(_generate, model)  # type: ignore[assignment]


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    streams = get_rng_state()
    group = active_group("tp")
    streams[SHARED_STREAM] = {
        kind: broadcast(state.to(transport_device(group)), group, source=0).cpu()
        for kind, state in streams[SHARED_STREAM].items()
    }
    set_rng_state(streams)
    return type(model).generate(model, *args, **kwargs)
