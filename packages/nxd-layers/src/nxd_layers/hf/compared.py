"""Architectures whose split models have been compared with one process, and what is wrong with plans.

The list is the outcome of a survey of all causal language models of transformers 5.23 that have a tensor-parallel plan:
tiny ones on two ranks in float64, the logits and all gradients equal to those of the unsplit model.
"""

# fmt: off
COMPARED = frozenset(
    [
        "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere", "cohere2",
        "cohere2_moe", "cohere_compass_text", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4",
        "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2",
        "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
        "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
        "granitemoehybrid", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_moe", "hy_v3", "hy_v4",
        "hyperclovax", "inkling_text", "internlm3", "iquestcoder", "jais2", "jamba", "kimi_linear", "kolibri1",
        "laguna", "lfm2_moe", "llama", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3",
        "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "nanochat",
        "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phi3", "phimoe",
        "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
        "qwen4_exp_text", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
    ]
)
# fmt: on

# What plans get wrong or leave out, by type of model: styles that are added to its own plan, in its base model.
CORRECTIONS: dict[str, dict[str, str]] = {
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},  # learned, and sees split activations
    "inkling_text": {
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.shared_experts": "moe_tp_experts",  # sums the gradients of the inputs, too
    },
}

REFUSED = {
    "doge": "its plan splits the heads, but not what each of them multiplies (A, q_norm, k_norm)",
    "inkling2_text": "its plan cuts the fused gate and up matrices of the experts as if they were one",
}
