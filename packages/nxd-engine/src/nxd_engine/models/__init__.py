"""Models that ship with the trainer."""

from nxd_engine.models.llama import (
    CausalLMOutput,
    KeyValueCache,
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaForCausalLM,
)

__all__ = ["LlamaConfig", "LlamaForCausalLM", "LlamaDecoderLayer", "CausalLMOutput", "KeyValueCache"]
