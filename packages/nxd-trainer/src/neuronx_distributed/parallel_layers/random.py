"""`neuronx_distributed.parallel_layers.random`: the random streams of nxd_state."""

from nxd_state import get_rng_state, rng_stream, seed_model_parallel, set_rng_state
from nxd_trainer.script_helpers import get_xla_rng_tracker

model_parallel_xla_manual_seed = seed_model_parallel

__all__ = [
    "model_parallel_xla_manual_seed",
    "get_xla_rng_tracker",
    "seed_model_parallel",
    "rng_stream",
    "get_rng_state",
    "set_rng_state",
]
