"""Chooses the layers that end the stages: given by name, spread evenly, or balanced by their costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

LayerClasses = type[nn.Module] | Sequence[type[nn.Module]]


def layer_names(module: nn.Module, transformer_layer_cls: LayerClasses) -> list[str]:
    """Return the names of the model's layers of this class (or these classes), in the model's order.

    Raises:
        ValueError: the model has no such layers.
    """
    classes = (transformer_layer_cls,) if isinstance(transformer_layer_cls, type) else tuple(transformer_layer_cls)
    names = [name for name, submodule in module.named_modules() if isinstance(submodule, classes)]
    if not names:
        wanted = ", ".join(it.__name__ for it in classes)
        raise ValueError(f"{type(module).__name__} has no layers of class {wanted}; pass the class of its layers")
    return names


def even_cuts(layers: Sequence[str], num_stages: int) -> list[str]:
    """Return the last layer of each stage but the last: equal numbers of layers, the remainder on later stages.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    check_layer_count(len(layers), num_stages)
    per_stage, remainder = divmod(len(layers), num_stages)
    cuts, end = [], 0
    for stage in range(num_stages - 1):
        end += per_stage + (stage >= num_stages - remainder)
        cuts.append(layers[end - 1])
    return cuts


def check_layer_count(num_layers: int, num_stages: int) -> None:
    """Raise a ValueError if there are fewer layers than stages."""
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {num_stages} stages; use at most {num_layers} stages "
            "(pipeline_model_parallel_size times virtual_pipeline_size)"
        )


def check_cuts(module: nn.Module, cuts: Sequence[str], num_stages: int) -> None:
    """Check names against the model and their number against the stages.

    Raises:
        ValueError: there are not `num_stages - 1` names, or one is duplicated or not in the model.
    """
    if len(cuts) != num_stages - 1:
        raise ValueError(
            f"pipeline_cuts names {len(cuts)} layers, {list(cuts)}; {num_stages} stages need {num_stages - 1}: "
            "the last layer of each stage but the last"
        )
    if len(set(cuts)) < len(cuts):
        raise ValueError(f"pipeline_cuts={list(cuts)} names a layer twice; name each once")
    names = {name for name, _ in module.named_modules()}
    for cut in cuts:
        if cut not in names:
            similar = [name for name in names if name.rpartition(".")[2] == cut.rpartition(".")[2]]
            hint = f"; did you mean {sorted(similar)[0]!r}?" if similar else "; see model.named_modules()"
            raise ValueError(f"pipeline_cuts names {cut!r}, which {type(module).__name__} does not have{hint}")


Measure = Callable[[nn.Module], float]


def balanced_cuts(layers: Sequence[str], costs: Sequence[float], num_stages: int) -> list[str]:
    """Return the last layer of each stage but the last, such that the most expensive stage is as cheap as possible.

    Ties are broken by the sum of squared costs. The result is exact, by dynamic programming over contiguous stages of
    at least one layer.

    Args:
        layers: the layers' names.
        costs: cost of each layer; optionally with two more, for the modules before the layers (first) and after them
            (last).
        num_stages: number of stages, at most the number of layers.

    Raises:
        ValueError: there are fewer layers than stages, a wrong number of costs, or a negative or infinite cost.
    """
    check_layer_count(len(layers), num_stages)
    if any(not math.isfinite(cost) or cost < 0 for cost in costs):
        raise ValueError(f"balance={list(costs)} has negative or non-finite costs; pass times, sizes or FLOPs")
    if len(costs) == len(layers) + 2:
        before, *own, behind = costs
        costs = [own[0] + before, *own[1:]]
        costs[-1] += behind
    elif len(costs) != len(layers):
        raise ValueError(
            f"balance has {len(costs)} costs, but the model has {len(layers)} layers; pass one for each, and "
            "optionally two more, for the modules before the layers and for those after them"
        )
    ends = _best_ends(costs, num_stages)
    return [layers[end - 1] for end in ends]


def _best_ends(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the end of each stage but the last."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    total = len(costs)
    # best[end]: the largest stage, the sum of squares and the ends of the stages so far, for the first `end` layers
    best = {end: (sums[end], sums[end] ** 2, [end]) for end in range(1, total + 1)}
    for stage in range(1, num_stages):
        longer = {}
        for end in range(stage + 1, total + 1):
            options = []
            for start in range(stage, end):
                largest, squares, ends = best[start]
                cost = sums[end] - sums[start]
                options.append((max(largest, cost), squares + cost**2, [*ends, end]))
            longer[end] = min(options)
        best = longer
    return best[total][2][:-1]


def parameter_count(module: nn.Module) -> float:
    """Return the number of elements of the module's parameters."""
    return float(sum(parameter.numel() for parameter in module.parameters()))


def flops_per_token(module: nn.Module) -> float:
    """Return the forward FLOPs per token of the module's matrices, without attention scores, as most counts do.

    Embeddings count as zero. All experts count, so layers of a mixture of experts look more expensive than they are;
    `layer_flops` counts exactly.
    """
    return float(
        sum(
            2 * parameter.numel()
            for part in module.modules()
            if not hasattr(part, "embedding_dim")
            for parameter in part.parameters(recurse=False)
            if parameter.dim() >= 2
        )
    )


MEASURES: Mapping[str, Measure] = {"parameters": parameter_count, "flops": flops_per_token}


def layer_flops(model: nn.Module, layers: Sequence[str], **inputs: Any) -> list[float]:
    """Count the FLOPs of a forward without computing it, as costs for `balance`.

    Args:
        model: the model, on any device including "meta".
        layers: the layers' names.
        **inputs: a microbatch as in training; only shapes and dtypes matter.

    Returns:
        0 for the modules before the layers (embeddings only look up), each layer's FLOPs, and those of the rest, such
        as the head.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415  (slow to import, and rarely needed)
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    counter = FlopCounterMode(display=False, depth=1_000)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        model(**tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs))
    root = type(model).__name__
    counts = {name: float(sum(count.values())) for name, count in counter.get_flop_counts().items()}
    of_layers = [counts.get(f"{root}.{name}", 0.0) for name in layers]
    return [0.0, *of_layers, counts.get("Global", 0.0) - sum(of_layers)]
