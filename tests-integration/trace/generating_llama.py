"""A small Llama of ours, for the tests of generation."""

import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    initializer_range=0.3,
)


def whole(config: LlamaConfig = CONFIG) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config, dtype=torch.float64).eval()
