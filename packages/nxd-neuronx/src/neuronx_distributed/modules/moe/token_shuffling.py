"""`neuronx_distributed.modules.moe.token_shuffling`: shuffling of tokens over replicas."""

from nxd_neuronx.experts import all_to_all_for_shuffle, token_shuffle, token_unshuffle

__all__ = ["all_to_all_for_shuffle", "token_shuffle", "token_unshuffle"]
