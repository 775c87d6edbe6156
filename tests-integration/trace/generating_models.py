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
# By all the names that models have for them.
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "initializer_range": 1.0,
}
OWN_SIZES: dict[str, dict[str, int]] = {
    "deepseek_v3": {  # latent attention, a dense first layer, groups of experts, and one that all tokens have
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")
# Large weights, so that the likeliest token depends on all that came before.
SPREAD = {"initializer_range": 0.3}


def whole(name: str) -> torch.nn.Module:
    """An unmodified model in float64, the same in every process; experts in float32, the widest their products know."""
    torch.manual_seed(0)
    sizes = SIZES | SPREAD | (EXPERTS if name in WITH_EXPERTS else {}) | OWN_SIZES.get(name, {})
    if name in OWN_SIZES:
        del sizes["head_dim"]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **sizes)).eval()
    return model if name in WITH_EXPERTS else model.double()


def llama() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("llama")))


def qwen2() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("qwen2")))


def qwen3() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("qwen3")))


def qwen3_moe() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("qwen3_moe"), expert_parallel=True))


def mixtral() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("mixtral"), expert_parallel=True))


def deepseek_v3() -> HuggingFaceDecoder:
    return HuggingFaceDecoder(parallelize(whole("deepseek_v3"), expert_parallel=True))


DECODERS = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "deepseek_v3": deepseek_v3,
}
