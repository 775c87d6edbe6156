"""transformers' models that have a tensor-parallel plan, theirs or ours, each shrunk to train in an instant.

The sizes are those that `nxd parity --hf` shrinks a user's architecture to, with layers of every type on both stages.
"""

from typing import Any

import torch
import transformers
from nxd_layers.hf.plans import ADDED_PLANS
from nxd_trainer.parity.architecture import SMALL_SIZES, SPECIAL_TOKENS, VOCABULARY
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SAMPLES = 8  # for two microbatches on each of four replicas
LENGTH = 13  # so that windows and chunks of the small configs end within it

# Of types that are no text decoders.
_MODEL_CLASSES = {
    "bart": "AutoModelForSeq2SeqLM",
    "bert": "AutoModelForMaskedLM",
    "roberta": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "whisper": "AutoModelForSpeechSeq2Seq",
}


def surveyed() -> list[str]:
    """The model types of all text decoders with a plan and a language-model head, and of all with a plan of ours.

    Left out are configs that hold others, such as one of images and one of text: their text decoders stand for
    themselves.
    """
    decoders = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _has_plan(CONFIG_MAPPING[name], "tp")}
    return sorted(decoders | set(ADDED_PLANS))


def with_experts() -> list[str]:
    """The model types of all text decoders with an expert-parallel plan and a language-model head."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _has_plan(CONFIG_MAPPING[name], "ep"))


def _has_plan(config_class: Any, axis: str) -> bool:
    return bool(getattr(config_class, f"base_model_{axis}_plan", None)) and not config_class.sub_configs


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A config of a few thousand parameters, with these keys changed."""
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(getattr(config_class, "attribute_map", {}))
    sizes = {name: value for name, value in (SMALL_SIZES | SPECIAL_TOKENS).items() if name in known}
    sizes |= {name: 0.0 for name in known if "dropout" in name or name.endswith("pdrop")}
    config = config_class(**sizes | OWN_SIZES.get(model_type, {}) | changes)
    config.use_cache = False
    config._experts_implementation = "eager"  # the other ones have no float64
    return config


# Where the common sizes contradict one another, or an architecture needs more of them.
_LATENT = {"num_key_value_heads": 4}
_SECOND_KIND = {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 16}
_SECOND_KIND |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_ENCODER_DECODER = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_start_token_id": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_TWO_KINDS = ["sliding_attention", "full_attention"] * 2
OWN_SIZES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": _LATENT | {"layer_group_size": 2},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1, 3]},
    "bart": _ENCODER_DECODER | {"d_model": 32, "encoder_layers": 2, "vocab_size": VOCABULARY},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": _TWO_KINDS,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots3_note_text": _LATENT | {"index_head_dim": 8, "per_layer_config": {2: _SECOND_KIND, 3: _SECOND_KIND}},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3_text": {"layer_types": _TWO_KINDS},
    "gemma4_text": {
        "layer_types": _TWO_KINDS,
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "gemma4_unified_text": {"layer_types": _TWO_KINDS, "num_kv_shared_layers": 0},
    "gemma3n_text": {
        "layer_types": _TWO_KINDS,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
    },
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"] * 2},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_loop_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LATENT | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kolibri1": {"layer_types": _TWO_KINDS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "sliding_attention"]},
    "longcat_flash": _LATENT | {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "minicpm3": _LATENT,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "sarvam_mla": _LATENT,
    "t5": {"d_ff": 48, "d_kv": 8, "num_layers": 2, "decoder_start_token_id": 0},
    "vit": {"image_size": 16, "patch_size": 8},
    "whisper": {
        **_ENCODER_DECODER,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    "youtu": _LATENT,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def tiny_model(model_type: str, **changes: Any) -> nn.Module:
    """A model in float64 whose every parameter has random values, norms and biases included.

    Args:
        model_type: as transformers names it.
        changes: keys of its config.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model_class = getattr(transformers, _MODEL_CLASSES.get(model_type, "AutoModelForCausalLM"))
    model = model_class.from_config(tiny_config(model_type, **changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def tiny_batch(model_type: str) -> dict[str, Tensor]:
    """What the model takes of `SAMPLES` samples, labels included."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    if model_type == "vit":
        images = torch.randn(SAMPLES, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": images, "labels": ids[:, 0] % 2}
    if model_type == "whisper":
        sound = torch.randn(SAMPLES, 8, 32, generator=generator, dtype=torch.float64)
        return {"input_features": sound, "labels": ids}
    return {"input_ids": ids, "labels": ids.flip(1) if model_type in ("bart", "t5") else ids.clone()}
