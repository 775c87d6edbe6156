"""Models that ship with the trainer."""

from nxd_trainer.models.llama import (
    CausalLMOutput,
    KeyValueCache,
    LlamaConfig,
    LlamaDecoderLayer,
    LlamaForCausalLM,
)

__all__ = ["LlamaConfig", "LlamaForCausalLM", "LlamaDecoderLayer", "CausalLMOutput", "KeyValueCache"]
