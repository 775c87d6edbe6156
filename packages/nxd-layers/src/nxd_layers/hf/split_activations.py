"""Activations between split layers that are more than functions of one element: learned ones, and sparse ones.

Each rank sees a part of their input. The gradient of a learned activation is then a part as well, and the mean of a
token's activations, as Gemma 3n has it, is one over all ranks.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from nxd_state import active_group
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.hf.layers import mark_partial_gradients
from nxd_layers.hf.plans import joined
from nxd_layers.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region

_ACTIVATION = re.compile(r"(.*_)?act(ivation)?(_.*)?")  # such as act_fn, activation_fn, intermediate_act_fn
_SPARSE = "_gaussian_topk"


def adapt_activations(model: nn.Module, split: Iterable[str], styles: Mapping[str, str]) -> None:
    """Have activations behind split outputs compute as with the whole.

    Args:
        model: the whole model.
        split: paths of the layers whose outputs are split.
        styles: of its modules, by path; an activation with a style of its own is left to that.
    """
    for path in dict.fromkeys(path.rpartition(".")[0] for path in split):
        parent = model.get_submodule(path)
        for name, child in parent.named_children():
            if _ACTIVATION.fullmatch(name) and joined(path, name) not in styles:
                mark_partial_gradients(list(child.parameters()))
        sparsity = getattr(parent, "activation_sparsity", 0.0)
        if hasattr(parent, _SPARSE) and sparsity > 0:
            setattr(parent, _SPARSE, partial(gaussian_top_k, _deviations_above_mean(sparsity)))


def gaussian_top_k(deviations: float, inputs: Tensor) -> Tensor:
    """What of a token's activations lies above their mean by more than some standard deviations; 0 for the others.

    Args:
        deviations: how many.
        inputs: `[..., size/tp]`.
    """
    size = inputs.shape[-1] * active_group("tp").size
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    mean = _sum_over_ranks(wide) / size
    deviation = (_sum_over_ranks((wide - mean).square()) / size).sqrt()
    factor = torch.full((), deviations, dtype=inputs.dtype, device=inputs.device)
    return F.relu(inputs - (mean.to(inputs.dtype) + deviation.to(inputs.dtype) * factor))


def _sum_over_ranks(inputs: Tensor) -> Tensor:
    """`[..., size/tp]` to `[..., 1]`, which each rank uses for its part of the outputs."""
    total = reduce_from_tensor_model_parallel_region(inputs.sum(dim=-1, keepdim=True))
    return copy_to_tensor_model_parallel_region(total)


def _deviations_above_mean(share: float) -> float:
    """Where this share of a normal distribution lies below, rounded as in transformers."""
    below = torch.tensor(share, dtype=torch.float32, device="cpu")
    return float(torch.erfinv(2 * below - 1) * math.sqrt(2))
