"""`neuronx_distributed.parallel_layers.random`: the random streams of nxd_state."""

from nxd_neuronx.process import RngTracker as XLARNGStatesTracker
from nxd_neuronx.process import get_xla_rng_tracker
from nxd_state import get_rng_state, rng_stream, seed_model_parallel, set_rng_state
from nxd_state import seed_model_parallel as model_parallel_xla_manual_seed

__all__ = [
    "model_parallel_xla_manual_seed",
    "get_rng_state",
    "rng_stream",
    "seed_model_parallel",
    "set_rng_state",
    "get_xla_rng_tracker",
    "XLARNGStatesTracker",
]
