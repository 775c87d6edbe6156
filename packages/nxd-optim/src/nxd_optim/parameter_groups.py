"""Parameter groups for an optimizer: which weights decay and which do not."""

import difflib
from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float, *, no_decay: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into those with weight decay and those without.

    Biases and norm weights, which have one dim, never decay (Loshchilov and Hutter 2019 decay only weights of linear
    maps, as do GPT-2 and its successors). This works on shards as well, because sharding keeps the number of dims.

    Args:
        model: the model; tied parameters are listed once, frozen ones are skipped.
        weight_decay: weight decay of the first group.
        no_decay: components of names ("embed_tokens") of further modules or parameters without decay.

    Returns:
        `[{"params": [...], "weight_decay": weight_decay}, {"params": [...], "weight_decay": 0.0}]`, without empty
        groups.

    Raises:
        ValueError: a component in `no_decay` occurs in no parameter's name.
    """
    components = {part for name, _ in model.named_parameters() for part in name.split(".")}
    for wanted in no_decay:
        if wanted not in components:
            near = difflib.get_close_matches(wanted, sorted(components), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the model has {sorted(components)}"
            raise ValueError(f"no_decay={wanted!r} occurs in no parameter's name{hint}")
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
