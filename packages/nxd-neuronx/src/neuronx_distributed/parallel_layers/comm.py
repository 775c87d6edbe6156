"""`neuronx_distributed.parallel_layers.comm`: torch-xla's collectives, over any transport."""

from nxd_neuronx.collectives import (
    all_gather,
    all_reduce,
    cpu_reduce_scatter,
    gloo_reduce_scatter,
    reduce_scatter,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "cpu_reduce_scatter",
    "gloo_reduce_scatter",
    "reduce_scatter",
]
