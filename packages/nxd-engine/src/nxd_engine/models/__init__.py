"""Models that ship with the engine."""

from nxd_engine.models.llama import CausalLMOutput, LlamaCache, LlamaDecoderLayer, LlamaForCausalLM
from nxd_engine.models.llama_config import LlamaConfig

__all__ = ["LlamaConfig", "LlamaForCausalLM", "LlamaDecoderLayer", "CausalLMOutput", "LlamaCache"]
