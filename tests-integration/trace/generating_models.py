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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 1.0}
# Large weights, so that the likeliest token depends on all that came before.
SPREAD = {"initializer_range": 0.3}


def whole(name: str) -> torch.nn.Module:
    """An unmodified model in float64, the same in every process; experts in float32, the widest their products know."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES | SPREAD | (EXPERTS if "moe" in name else {}))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model if "moe" in name else model.double()


def llama() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("llama")))


def qwen2() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("qwen2")))


def qwen3() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("qwen3")))


def qwen3_moe() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("qwen3_moe")))


DECODERS = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe}
