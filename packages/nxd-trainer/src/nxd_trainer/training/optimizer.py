"""The optimizer of a run, and what averages its gradients: AdamW with whole or, by ZeRO-1, with shared-out state."""

from typing import Any

import torch
from nxd_optim import GradientReducer, NeuronZero1Optimizer
from torch import Tensor, nn
from torch.optim import AdamW

from nxd_trainer.recipe import Recipe


def build_optimizer(recipe: Recipe, model: nn.Module) -> AdamW | NeuronZero1Optimizer:
    """AdamW that decays matrices and leaves norms alone.

    With `parallel.zero1` each replica keeps a part of its state (Rajbhandari et al. 2020). Weights narrower than
    float32 then learn by float32 masters, which checkpoints hold, and gradients are accumulated in float32.
    """
    options = recipe.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    device = parameters[0].device
    # On XLA the count of steps, too, is data; bias corrections that have become 1 would make another graph.
    kind: dict[str, Any] = {"capturable": True} if device.type == "xla" else {"fused": device.type in ("cpu", "cuda")}
    if not recipe.parallel.zero1:
        return AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, **kind)
    return NeuronZero1Optimizer(
        groups,
        AdamW,
        grad_clipping=recipe.train.max_grad_norm > 0,
        max_norm=recipe.train.max_grad_norm or None,
        use_grad_acc_hook=True,
        higher_cc_precision=True,
        save_master_weights=True,
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        **kind,
    )


def learning_rate_on(device: torch.device, rate: float) -> float | Tensor:
    """A learning rate as an optimizer takes it: on XLA as data, 0-d, so that a schedule's steps are one graph."""
    # Made as [1], since torch-xla takes the scalars 0 and 1 for constants.
    return torch.tensor([rate], device=device).view(()) if device.type == "xla" else rate


def build_reducer(optimizer: AdamW | NeuronZero1Optimizer, model: nn.Module) -> GradientReducer | NeuronZero1Optimizer:
    """What averages the gradients over the replicas; with ZeRO-1 that is the optimizer itself."""
    return optimizer if isinstance(optimizer, NeuronZero1Optimizer) else GradientReducer(model.parameters())
