"""Models that ship with the trainer."""

from nxd_trainer.models.llama import KeyValueCache, LlamaConfig, LlamaForCausalLM

__all__ = ["LlamaConfig", "LlamaForCausalLM", "KeyValueCache"]
