"""`neuronx_distributed.parallel_layers.loss_functions`: the losses of nxd_layers."""

import nxd_layers
from nxd_neuronx.arguments import takes_names_too
from nxd_neuronx.layers import from_parallel_logits_to_logprobs

parallel_cross_entropy = takes_names_too(vocab_parallel_logits="parallel_logits", target="labels")(
    nxd_layers.parallel_cross_entropy
)

__all__ = ["parallel_cross_entropy", "from_parallel_logits_to_logprobs"]
