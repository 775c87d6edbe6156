"""`neuronx_distributed.parallel_layers.parallel_state`: the same module as `neuronx_distributed.parallel_state`."""

import neuronx_distributed.parallel_state as _the_same
from neuronx_distributed.parallel_state import *  # noqa: F403

__all__ = _the_same.__all__
