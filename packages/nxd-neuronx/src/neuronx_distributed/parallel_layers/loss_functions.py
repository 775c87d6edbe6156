"""`neuronx_distributed.parallel_layers.loss_functions`: the losses of nxd_layers."""

from nxd_layers import parallel_cross_entropy
from nxd_neuronx.layers import (
    DistributedLogprob,
    from_parallel_logits_to_logprobs,
)

__all__ = ["parallel_cross_entropy", "DistributedLogprob", "from_parallel_logits_to_logprobs"]
