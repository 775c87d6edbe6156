"""The type in which a run computes; that of its weights is chosen where the model is made."""

import torch
from nxd_state import get_device

from nxd_trainer.recipe import Recipe


def autocast(recipe: Recipe) -> torch.autocast:
    """For the forward pass, as a context manager or a decorator: matrix products as `train.autocast` says."""
    return torch.autocast(get_device().type, dtype=torch.bfloat16, enabled=recipe.train.autocast == "bfloat16")
