"""Decoders for the tests of generation, in a module that worker processes can import."""

import torch
import transformers
from nxd_layers.hf import parallelize
from nxd_trace.generation import HuggingFaceDecoder

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# Large weights, so that the likeliest token depends on all that came before.
SPREAD = {"initializer_range": 0.3}


def whole(name: str) -> torch.nn.Module:
    """An unmodified model in float64, the same in every process."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **SPREAD)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def llama() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("llama")))


def qwen2() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("qwen2")))


def qwen3() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("qwen3")))


DECODERS = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
