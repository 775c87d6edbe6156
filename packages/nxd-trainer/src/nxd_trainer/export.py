"""Writing a checkpoint as a Hugging Face folder: `config.json` and `model.safetensors`.

A checkpoint's tensors have the names and shapes of the Hugging Face model already, so this copies them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import nxd_ckpt
import torch
from safetensors.torch import save_file

from nxd_trainer.checkpoint import OPTIMIZER_PREFIX
from nxd_trainer.models import LlamaConfig
from nxd_trainer.recipe import recipe_from_dict


def export_hugging_face(
    folder: str | Path, target: str | Path, tag: str | None = None, *, dtype: torch.dtype | None = None
) -> Path:
    """Write the model of a checkpoint so that `transformers` loads it. Needs no process group.

    Args:
        folder: a run's checkpoints.
        target: the folder to write; made if need be.
        tag: the newest complete one if None.
        dtype: of the written tensors; the checkpoint's if None.

    Returns:
        The target folder.

    Raises:
        ValueError: the target already holds a model.
        nxd_ckpt.CheckpointError: there is no such checkpoint, or it is damaged.
    """
    checkpoint = nxd_ckpt.open_checkpoint(folder, tag)
    target = Path(target)
    if (target / "model.safetensors").exists():
        raise ValueError(f"{target} already holds a model.safetensors; remove it or choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**checkpoint.objects["model"])
    names = [name for name in checkpoint.tensors if not name.startswith((OPTIMIZER_PREFIX, "rng/"))]
    tensors = {name: checkpoint.read(name).to(dtype) for name in names}
    stored_dtype = next(iter(tensors.values())).dtype
    unfinished = target / ".model.safetensors.unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    content = hugging_face_config(config, stored_dtype, end_token=checkpoint.objects["end_of_document"])
    config_file = target / "config.json"
    config_file.write_text(json.dumps(content, indent=2) + "\n")
    shutil.copymode(config_file, unfinished)  # safetensors makes files that only their owner may read
    _copy_tokenizer(checkpoint.objects["recipe"], target)
    unfinished.rename(target / "model.safetensors")
    return target


def hugging_face_config(config: LlamaConfig, dtype: torch.dtype, *, end_token: int) -> dict[str, Any]:
    """The `config.json` of a LlamaForCausalLM with these sizes."""
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
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": end_token,
    }


def _copy_tokenizer(recipe_content: dict[str, Any], target: Path) -> None:
    """A Hugging Face tokenizer goes along with the model; the byte tokenizer has no files."""
    source = recipe_from_dict(recipe_content).data.tokenizer
    if source is None:
        return
    files = [source] if source.is_file() else sorted(source.glob("*token*"))
    for file in files:
        shutil.copy(file, target / file.name)
