"""Makes a small case for `compare` from an architecture of transformers that is split by its own plan.

The architecture is that of a folder's `config.json`; no weights are needed. Its sizes are reduced, but the difficult
features remain: grouped heads, several experts, windows shorter than the sequence, layers of every kind.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nxd_engine.hugging_face import check_keys, full_config, model_on_meta, read_config, with_architecture
from nxd_layers import hf
from nxd_layers.hf.towers import leave_out
from nxd_pipeline.partition import materialize
from nxd_state import find_towers
from torch import nn

from nxd_trainer.parity.case import ParityCase

VOCABULARY = 64
LENGTH = 7  # tokens per sequence
LAYERS = 4

# By config key.
SMALL_SIZES: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_hidden_size": 48,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "global_head_dim": 8,
    # embeddings of each layer
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # state-space and linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def case_of_architecture(
    folder: Path, changes: Mapping[str, Any], tensor_parallel_size: int, steps: int = 2
) -> ParityCase:
    """Return a case with training steps of a small model of the folder's architecture, split by its own plan.

    Args:
        folder: the folder of a transformers model; only its `config.json` is read.
        changes: config keys to override, in case the small sizes contradict one another; those of the language model
            if it is multimodal.
        tensor_parallel_size: number of ranks that split the model.
        steps: number of steps to train.

    Raises:
        ValueError: there is no such config, transformers has no language model for it, or no small model can be made
            and run from it.
    """
    config = read_config(folder)
    if "auto_map" in config:
        raise ValueError(f"{folder}: its model is Python code beside the weights (auto_map), which is never run here")
    if tensor_parallel_size < 2:
        raise ValueError("a single rank cannot split the model; use 2 or more ranks (--nproc 2)")
    content, outline = _language_model(config)
    part = _text_key(outline)
    check_keys(content if part is None else content[part], changes)
    small = small_config(config)
    small = {**small, **changes} if part is None else {**small, part: {**small[part], **changes}}
    _check_runs(small)
    shape = (2 * tensor_parallel_size, LENGTH)
    generator = torch.Generator().manual_seed(1)
    vocabulary = (small if part is None else small[part])["vocab_size"]
    tokens = [torch.randint(len(SPECIAL_TOKENS), vocabulary, shape, generator=generator) for _ in range(steps)]
    return ParityCase(
        model_fn=lambda: hf.parallelize(small_model(small), plan="own"),
        reference_fn=lambda: small_model(small),
        batches=[{"input_ids": ids, "labels": ids.clone()} for ids in tokens],
        nxd_config={"tensor_parallel_size": tensor_parallel_size},
    )


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of the same architecture with a few thousand parameters and no dropout.

    Sizes are reduced to those in `SMALL_SIZES`. Lists with an entry per layer keep an entry of every kind, and there
    are more than `LAYERS` layers if there are more kinds. Everything else is unchanged. Of a multimodal model this is
    the config of its language model; its towers keep their sizes, see `small_model`.
    """
    content, outline = _language_model(config)
    part = _text_key(outline)
    names: Mapping[str, str] = outline.config.get_text_config().attribute_map
    of_text = content if part is None else content[part]
    made = _small_text(of_text, names) | _small_rotary(outline, of_text)
    small = made if part is None else {**content, part: made}
    small |= {"dtype": "float32"}
    small.pop("quantization_config", None)
    return small


def _small_text(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Reduce the config of a language model, which has other names for some keys."""
    small = {**content, "use_cache": False}
    for name, size in SMALL_SIZES.items():
        key = names.get(name, name)
        if isinstance(content.get(key), int) and content[key] > size:
            small[key] = size
    heads, groups = (names.get(f"num_{kind}_heads", f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if content.get(groups) is not None and content.get(groups) == content.get(heads):
        small[groups] = small[heads]
    small |= {key: 0.0 for key in content if "dropout" in key or key.endswith("pdrop")}
    small |= {key: token for key, token in SPECIAL_TOKENS.items() if key in content}
    return small | _lists_of_layers(content, names.get("num_hidden_layers", "num_hidden_layers"))


def _small_rotary(outline: nn.Module, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary positions whose three sections (mRoPE), if there are any, fit into the frequencies of a small head.

    Models have sections of a large head if the config names none.
    """
    rope = content.get("rope_parameters")
    if not isinstance(rope, Mapping) or not any(hasattr(part, "mrope_section") for part in outline.modules()):
        return {}
    whole: dict[str, Any] = {"mrope_section": [1, 1, SMALL_SIZES["head_dim"] // 2 - 2]}
    if rope.get("partial_rotary_factor") is not None:
        whole["partial_rotary_factor"] = 1.0
    return {"rope_parameters": {**rope, **whole}}


def small_model(content: Mapping[str, Any]) -> nn.Module:
    """Make a model with random values in every parameter, including norms and biases, from torch's RNG state.

    The towers of a multimodal model are left out: it is compared on text alone.
    """
    made: Any = model_on_meta(content)
    made.config._experts_implementation = "eager"  # the others do not support float64
    leave_out(made, find_towers(made))
    materialize(made, hf.param_init_fn_of(made))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    small: nn.Module = made.eval()
    return small


def remember_equal(folder: Path) -> str:
    """Record that this user's models of the folder's type may be split by their own plan; says where it is recorded."""
    _, outline = _language_model(read_config(folder))
    record = hf.remember_as_compared(outline)
    on_text = "" if _text_key(outline) is None else ", compared on text alone"
    return f"Models of type {outline.config.model_type!r} are split by their own plan from now on{on_text}: {record}"


def _language_model(config: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the complete config of a config's language model, and the model on the meta device.

    It is the causal language model of its type, or the class that a multimodal config names.
    """
    content, outline = full_config(config), model_on_meta(config)
    if outline is not None and _text_key(outline) is not None:
        return content, outline
    headless = {name: value for name, value in config.items() if name != "architectures"}
    content = full_config(with_architecture(headless))
    return content, model_on_meta(content)


def _text_key(model: Any) -> str | None:
    """Return the key of a multimodal config that holds the config of its language model; None for other models."""
    text = model.config.get_text_config()
    if text is model.config:
        return None
    return next(key for key in model.config.sub_configs if getattr(model.config, key, None) is text)


def _lists_of_layers(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Per-layer lists cut to the first layer of each kind, then filled with the first others; and the layer count."""
    layers = content.get(key)
    if not isinstance(layers, int) or layers <= LAYERS:
        return {}
    lists = {name: value for name, value in content.items() if isinstance(value, list) and len(value) == layers}
    kinds: dict[str, int] = {}
    for index in range(layers):
        kinds.setdefault(json.dumps([value[index] for value in lists.values()]), index)
    firsts = list(kinds.values())
    others = [index for index in range(layers) if index not in firsts]
    kept = sorted([*firsts, *others[: max(LAYERS - len(firsts), 0)]])
    return {key: len(kept)} | {name: [value[index] for index in kept] for name, value in lists.items()}


def _check_runs(content: Mapping[str, Any]) -> None:
    """Raise ValueError if the small model cannot be made or run."""
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    try:
        model: Any = small_model(content)
        loss = model(input_ids=ids, labels=ids).loss
    except Exception as error:  # contradictory sizes may lead to any error
        raise ValueError(
            f"the small model of type {content['model_type']} cannot be made or run: {type(error).__name__}: {error}. "
            "Its sizes may contradict one another; override them with KEY=VALUE, such as head_dim=16"
        ) from error
    if not bool(loss.isfinite()):
        raise ValueError(f"the loss of the small model of type {content['model_type']} is {loss}; override its sizes")
    if not hf.has_plan(model):
        raise ValueError(
            f"models of type {content['model_type']} have no tensor-parallel plan; pass one in a script "
            "(nxd_layers.hf.parallelize(model, plan=...)), and compare it with MODULE:FUNCTION"
        )
