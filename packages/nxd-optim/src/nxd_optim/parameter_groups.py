"""Parameter groups for an optimizer: which weights decay and which do not."""

import difflib
from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float, *, no_decay: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into those with weight decay and those without.

    Biases and the weights of norms, which have one dim, never decay (Loshchilov and Hutter 2019 decay weights of
    linear maps only; GPT-2 and its successors leave the rest out). Works on shards as well: cutting a tensor over
    ranks keeps its number of dims.

    Args:
        model: tied parameters come once, frozen ones not at all.
        weight_decay: of the first group.
        no_decay: modules or parameters that do not decay either, by a component of their name: "embed_tokens".

    Returns:
        `[{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}]`, without a group
        that would be empty.

    Raises:
        ValueError: a component in `no_decay` occurs in no parameter's name.
    """
    components = {part for name, _ in model.named_parameters() for part in name.split(".")}
    for wanted in no_decay:
        if wanted not in components:
            near = difflib.get_close_matches(wanted, sorted(components), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {sorted(components)}"
            raise ValueError(f"no_decay={wanted!r} is no component of any parameter's name{hint}")
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim < 2 or not set(no_decay).isdisjoint(name.split("."))
            (plain if exempt else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
