"""Compares the logits of a checkpoint in our model with those of its export in transformers. Needs transformers."""

from pathlib import Path

import torch
from nxd_state import destroy_model_parallel, initialize_model_parallel
from nxd_trainer.generate import load_for_generation


@torch.no_grad()
def largest_logit_difference(checkpoints: Path, exported: Path) -> float:
    """Largest absolute difference over a batch of random tokens, both models in float32 in this process."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (optional package)

    initialize_model_parallel()
    model, tokenizer = load_for_generation(checkpoints)
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokens = torch.randint(0, tokenizer.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    difference = (model(tokens) - theirs(tokens).logits).abs().max()
    destroy_model_parallel()
    return float(difference)
