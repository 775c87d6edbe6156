"""Architectures whose sharded models have been compared with one process, and the refusal of others.

The lists are the outcome of a survey of all causal language models of transformers 5.24 that have a tensor-parallel
plan, and of all models with a plan of ours: tiny ones on two ranks in float64, with the loss and all gradients equal to
those of the unsharded model. Users compare others themselves (`nxd parity --hf FOLDER`); those that pass are recorded
in their cache folder.
"""

import hashlib
import inspect
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nxd_state import is_multimodal, is_transformers_model
from torch import nn

from nxd_layers.hf.transformers_models import (
    base_model_path,
    model_type_of,
    text_config,
    transformers_plan,
)

# fmt: off
COMPARED = frozenset(
    [
        "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bart",
        "beam", "bert", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm",
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe",
        "exaone", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text",
        "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
        "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
        "granitemoehybrid", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
        "hy_v4", "hyperclovax", "inkling_text", "internlm3", "iquestcoder", "jais2", "jamba", "kimi_linear", "kolibri1",
        "laguna", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "longcat_flash", "mamba2", "mellum",
        "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3",
        "mistral", "mixtral", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe",
        "opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
        "qwen3_next", "qwen4_exp_text", "roberta", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open",
        "starcoder2", "t5", "vaultgemma", "vit", "whisper", "youtu",
    ]
)

# Model types whose experts were distributed over expert-parallel ranks as well.
COMPARED_EXPERTS = frozenset(
    [
        "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
        "deepseek_v32", "deepseek_v4", "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint",
        "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa",
        "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling2_loop_text",
        "inkling2_text", "inkling_text", "jamba", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe",
        "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe",
        "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "sarvam_mla",
        "sarvam_moe", "solar_open", "zaya",
    ]
)

# Multimodal types, with images and without. Their language models are of a type in `COMPARED`, or of one of their own.
COMPARED_MULTIMODAL = frozenset(
    [
        "aya_vision", "cohere2_vision", "gemma3", "glm4v", "granite4_vision", "idefics3", "internvl", "llava_next",
        "mistral3", "mllama", "paligemma", "qwen2_5_vl", "qwen3_5", "qwen3_vl",
    ]
)
# fmt: on

# Model types whose blocks call `shared_experts` once, after the routed experts, with the block's own input. Neither
# configs nor registries of transformers say so; tests-integration/hugging_face calls a block of each type.
SHARED_EXPERTS_LAST = frozenset(
    [
        *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1"),
        *("dots3_note_text", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear"),
        *("kolibri1", "nemotron_h", "sarvam_mla", "sarvam_moe", "solar_open"),
    ]
)

REFUSED = {
    "doge": "its plan splits the heads, but not the parameters that each head has of its own (A, q_norm, k_norm)",
    **dict.fromkeys(
        ("inkling2_text", "inkling2_loop_text"),
        "its plan shards the fused gate and up matrices of the experts as if they were one",
    ),
}

_CHOOSES_KEYS = "its attention chooses among the keys of the full sequence"
_ADDS_BIAS = "it adds a bias of positions to the scores of its attention"
_OWN_LOSS = "it has a loss function of its own, which would see the positions of one rank only"
REFUSED_CONTEXT = {
    **dict.fromkeys(("axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm_moe_dsa", "hy_v4"), _CHOOSES_KEYS),
    **dict.fromkeys(("minimax_m3_vl_text", "qwen4_exp_text"), _CHOOSES_KEYS),
    **dict.fromkeys(("bert", "roberta"), _OWN_LOSS),
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), _ADDS_BIAS),
    **dict.fromkeys(("bart", "t5", "whisper"), "it has two sequences, those of an encoder and of a decoder"),
    "bloom": "its attention does not go through transformers' registry of attention functions",
    "doge": "its attention makes a mask of its own",
    "llama4_text": "it scales queries by their positions, which it counts on each rank",
    "vit": "it has no sequence of tokens",
    "zaya": "its attention has convolutions along the sequence",
}

# Model types whose sequences were split over context-parallel ranks: the others of `COMPARED`, and one without a plan.
COMPARED_CONTEXT = (COMPARED | COMPARED_MULTIMODAL).difference(REFUSED_CONTEXT) | {"dory"}


def check_tensor_parallel(model: Any) -> None:
    """Raise a ValueError if models of this type have not been compared with one process."""
    model_type = model_type_of(model)
    if not _is_in(COMPARED | COMPARED_MULTIMODAL, model) and not _is_remembered(model):
        reason = REFUSED.get(model_type, "its loss and gradients have not been compared with those of one process")
        raise ValueError(
            f"models of type {model_type!r} are not split by their own plan: {reason}. Run "
            "nxd parity --hf FOLDER with its config.json, which compares them in a minute and, if they are equal, "
            "records that they may be split; or pass another plan (plan=...)"
        )


def _is_in(compared: frozenset[str], model: Any) -> bool:
    """Return whether a model, and the language model in it, are of types that have been compared."""
    model_type, of_text = model_type_of(model), _text_type_of(model)
    is_text_known = of_text in compared or (is_multimodal(model) and of_text.startswith(f"{model_type}_text"))
    return model_type in compared and is_text_known


def _text_type_of(model: Any) -> str:
    return str(text_config(model).model_type) if is_multimodal(model) else model_type_of(model)


def check_expert_parallel(model: Any) -> None:
    """Raise a ValueError if models of this type have not been compared with their experts distributed over ranks."""
    model_type = model_type_of(model)
    if model_type not in COMPARED_EXPERTS:
        raise ValueError(
            f"experts of models of type {model_type!r} are not split by their own plan: their loss and gradients have "
            "not been compared with those of one process. To split them anyway, pass a plan (plan=... or plan='own'), "
            "and compare the numbers"
        )


def check_context_parallel(model: Any, *, has_known_loss: bool) -> None:
    """Raise a ValueError if models of this type have not been compared with their sequences split.

    Args:
        model: a model of transformers.
        has_known_loss: whether it is a causal language model; a model without a head is accepted as well.
    """
    model_type = model_type_of(model)
    refused = f"sequences of models of type {model_type!r} are not split over context-parallel ranks: "
    reason = REFUSED_CONTEXT.get(model_type) or REFUSED_CONTEXT.get(_text_type_of(model))
    if reason:
        raise ValueError(f"{refused}{reason}; use context_parallel_size=1")
    if not _is_in(COMPARED_CONTEXT, model):
        raise ValueError(
            f"{refused}their loss and gradients have not been compared with those of one process. To split them "
            "anyway, pass plan='own', and compare the numbers"
        )
    if not has_known_loss and base_model_path(model):
        raise ValueError(
            f"{type(model).__name__} is not a causal language model: its head would see the positions of one rank "
            "instead of full sequences; use context_parallel_size=1, or the model without the head"
        )


def remember_as_compared(model: nn.Module) -> Path:
    """Record that models of this type may be sharded by their own plan for this user, as those of the survey may.

    The record holds for this plan, this source of the model, and these versions of transformers and of nxd-layers. It
    is an empty file in `$NXD_COMPARED_MODELS`, or in the user's cache folder; each host of a job needs to see it.

    Args:
        model: a model of the type, which has been compared with one process.

    Returns:
        The path of the file.

    Raises:
        ValueError: the model's class has no source file, so that a change to it would go unnoticed.
    """
    source = _source_of(model)
    if source is None:
        raise ValueError(
            f"{type(model).__name__} has no source file; define the class in a module, or use one of transformers"
        )
    record = _record_of(model, source)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.touch()
    return record


def _is_remembered(model: Any) -> bool:
    source = _source_of(model) if is_transformers_model(model) else None
    return source is not None and _record_of(model, source).exists()


def _source_of(model: Any) -> bytes | None:
    try:
        source = inspect.getsourcefile(type(model))
    except TypeError:  # a class defined interactively
        return None
    return None if source is None else Path(source).read_bytes()


def _record_of(model: Any, source: bytes) -> Path:
    """Return the path of the record that models like this one have been compared."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("NXD_COMPARED_MODELS") or cache / "nxd_layers" / "compared_models")
    made_of = [
        type(model).__qualname__,
        sorted(transformers_plan(model).items()),
        hashlib.sha256(source).hexdigest(),
        version("transformers"),
        version("nxd-layers"),
    ]
    return folder / f"{model_type_of(model)}-{hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]}"
