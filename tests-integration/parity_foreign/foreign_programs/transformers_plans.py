"""A model of transformers from a folder, split by transformers' own plans: tensor and expert parallel, and FSDP2.

`train(folder, {"tp_size": 2})` in a process group; without sizes one process trains the whole model.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from hf_survey.architectures import tiny_config
from transformers.distributed import DistributedConfig

OWN_SIZES: dict[str, dict[str, Any]] = {"inkling2_text": {"unpadded_vocab_size": 64}}
BATCH, LENGTH = 4, 12


def save(model_type: str, folder: Path) -> Path:
    """Save a tiny model of a type with random weights, those of norms too, and return its folder."""
    path = folder / model_type
    if not path.exists():
        config = tiny_config(model_type, num_hidden_layers=2, layer_types=None, **OWN_SIZES.get(model_type, {}))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(path)
    return path


def train(folder: Path, sizes: dict[str, Any] | None = None, *, steps: int = 2, **options: Any) -> None:
    """Train a few steps; ranks of a data-parallel size above 1 have each a part of the batch."""
    if sizes is not None:
        options["distributed_config"] = DistributedConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.get_default_dtype(),
        attn_implementation="eager",
        **{"experts_implementation": "eager", **options},
    ).train()
    replicas = (sizes or {}).get("fsdp_size", 1) * (sizes or {}).get("dp_replicate_size", 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(steps):
        tokens = torch.randint(64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
        if replicas > 1:
            tokens = tokens.chunk(replicas)[dist.get_rank() * replicas // dist.get_world_size()]
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
