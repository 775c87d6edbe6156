"""A Hugging Face Llama as the Llama of this package, which `nxd train` and `nxd generate` run, and back."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from nxd_trainer.models import LlamaConfig
from nxd_trainer.recipe import DataSection, recipe_from_dict, recipe_to_dict

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def our_config(config: Mapping[str, Any]) -> LlamaConfig:
    """The sizes that a `config.json` says.

    Raises:
        ValueError: it is of another model, or of a Llama that ours cannot be.
    """
    if config.get("model_type") != "llama" or config.get("architectures") not in (None, ["LlamaForCausalLM"]):
        raise ValueError(f"{config.get('architectures') or config.get('model_type')} is not a LlamaForCausalLM")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sizes = {field.name: config[field.name] for field in fields(LlamaConfig) if config.get(field.name) is not None}
    sizes["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", LlamaConfig.rope_theta))
    sizes.setdefault("num_key_value_heads", sizes.get("num_attention_heads", LlamaConfig.num_attention_heads))
    made = LlamaConfig(**sizes)
    expected = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": made.head_size,
        "rope type": "default",
    }
    found = {**config, "rope type": rope.get("rope_type", rope.get("type", "default"))}
    wrong = [f"{name}={found[name]}" for name, value in expected.items() if found.get(name, value) not in (None, value)]
    if wrong:
        raise ValueError(f"this package's own Llama has no {', '.join(wrong)}")
    return made


def hugging_face_config(config: LlamaConfig, *, end_token: int | None) -> dict[str, Any]:
    """The `config.json` of a LlamaForCausalLM with these sizes, without the type of its weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": None,
        "bos_token_id": None,
        "eos_token_id": end_token,
    }


def run_objects(config: Mapping[str, Any], folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """What a checkpoint of a run of `nxd train` says of its model, for one that comes from a Hugging Face folder.

    Raises:
        ValueError: `nxd train` and `nxd generate` cannot run it.
    """
    own = our_config(config)
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} is none of {', '.join(map(str, DTYPES))}")
    tokenizer = folder.resolve() if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None
    data: dict[str, object] = {"sequence_length": min(DataSection.sequence_length, own.max_position_embeddings)}
    if tokenizer is not None:
        data["tokenizer"] = str(tokenizer)
    content = {"model": asdict(own), "train": {"dtype": str(dtype).removeprefix("torch.")}, "data": data}
    end_tokens = config.get("eos_token_id")
    return {
        "model": asdict(own),
        "recipe": recipe_to_dict(recipe_from_dict(content)),
        "end_of_document": next(iter(end_tokens), None) if isinstance(end_tokens, list) else end_tokens,
    }
