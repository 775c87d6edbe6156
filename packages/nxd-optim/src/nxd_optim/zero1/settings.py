"""Arguments of ZeRO-1 and settings of parameter groups: checked, and carried between optimizers.

An optimizer must treat every element on its own, so that it may be given flat parts of parameters. This is checked by
trying it, not by its name: any class works that updates two parts as it updates the whole. The documented lists of
ranks name groups that the mesh has anyway.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from nxd_state import Group, active_group, all_gather_object, get_world_group, model_parallel_is_initialized
from torch import Tensor
from torch.optim import Optimizer

RankLists = Sequence[Sequence[int]]

_SHARDING_AXES = (("dp", "cp"), ("dp",))
_NORM_AXES = (("tp",), ("pp",), ("pp", "tp"), ("pp", "dp", "cp", "tp"))

# Values for trying optimizers.
_TRIED_SHAPE = (160, 144)  # some optimizers look at rows and columns of large matrices only
_TRIED_CUT = 10_007
_TRIED_STEPS = 3


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_settings(sources: list[dict[str, Any]], targets: list[dict[str, Any]]) -> None:
    """Give each target group the settings of its source."""
    for source, target in zip(sources, targets, strict=True):
        target.update(settings_of(source))


def for_the_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's arguments for the CPU, where optimizers are tried: no `capturable`, tensors as numbers."""
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in arguments.items()
        if key != "capturable"
    }


def check_max_norm(max_norm: float | None) -> float:
    """The norm to clip to, 1.0 if None.

    Raises:
        ValueError: negative or not a number.
    """
    if max_norm is None:
        return 1.0
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm={max_norm} must be zero or more; pass grad_clipping=False to switch clipping off")
    return float(max_norm)


def check_cap(argument: str, megabytes: float) -> float:
    """The cap on a bucket.

    Raises:
        ValueError: negative.
    """
    if megabytes < 0:
        raise ValueError(f"{argument}={megabytes} must be positive, or 0 for the default")
    return megabytes


def check_elementwise(optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> dict[str, Any]:
    """Take a few steps with a small matrix, whole and in two flat parts, and compare.

    Each part has an optimizer of its own, as it has on a rank, so that statistics over all parameters show as well.

    Returns:
        All defaults of the optimizer's parameter groups, also those that were not given.

    Raises:
        ValueError: the optimizer cannot be made or does not update the parts as it updates the whole.
    """
    # Made here so that its errors about arguments come before ours.
    complete = optimizer_class([{"params": [torch.zeros(1, 1)]}], **defaults).defaults
    settings = for_the_cpu(defaults)
    if "lr" in inspect.signature(optimizer_class).parameters:
        settings["lr"] = 0.01  # a warm-up may start at zero, which would hide every difference
    whole = torch.linspace(-1, 1, _TRIED_SHAPE[0] * _TRIED_SHAPE[1], dtype=torch.float64).cos().mul(0.1)
    advice = "give NeuronZero1Optimizer an elementwise one, such as AdamW, or use this one without it"
    try:
        with torch.random.fork_rng(devices=[]):
            expected = _train(optimizer_class, settings, [whole.view(_TRIED_SHAPE).clone()])
        with torch.random.fork_rng(devices=[]):
            found = _train(optimizer_class, settings, list(whole.clone().tensor_split([_TRIED_CUT])))
    except Exception as error:
        raise ValueError(
            f"{optimizer_class.__name__} cannot update flat parts of parameters: {type(error).__name__}: {error}; "
            f"{advice}"
        ) from error
    if not torch.allclose(found, expected, rtol=1e-6, atol=1e-12):
        raise ValueError(
            f"{optimizer_class.__name__} is not elementwise: it updates two flat parts of a matrix otherwise than the "
            f"whole matrix, so with ZeRO-1 the result would depend on the number of ranks; {advice}"
        )
    return complete


def _train(optimizer_class: type[Optimizer], settings: dict[str, Any], parts: list[Tensor]) -> Tensor:
    parameters = [torch.nn.Parameter(part) for part in parts]
    optimizers = []
    for parameter in parameters:  # a rank may own nothing of a group
        groups: list[dict[str, Any]] = [{"params": [parameter]}, {"params": []}]
        optimizers.append(optimizer_class(groups, **settings))
    for step in range(_TRIED_STEPS):
        start = 0
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            positions = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
            parameter.grad = positions.mul(0.37 + step).sin().mul(positions.add(1).log()).view_as(parameter)
            start += parameter.numel()
            optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def find_sharding_group(sharding_groups: RankLists | None) -> Group:
    """The group of this rank: data times context parallel, which None means, or data parallel alone.

    Raises:
        RuntimeError: there are several ranks but no mesh.
        ValueError: the lists name other groups, do not hold every rank once, or differ between ranks.
    """
    if not model_parallel_is_initialized() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"torch.distributed runs {dist.get_world_size()} ranks, but no mesh says what they do; call "
            "nxd_state.initialize_model_parallel() before making the optimizer"
        )
    if sharding_groups is None:
        return active_group("dp", "cp")
    ranks = _check_rank_lists("sharding_groups", sharding_groups)
    group = _find(ranks, _SHARDING_AXES)
    if group is None:
        data_and_context, data = (_as_lists(active_group(*axes).replica_groups) for axes in _SHARDING_AXES)
        raise ValueError(
            f"sharding_groups={_as_lists(ranks)} are not the replicas of the mesh; leave them out, or name "
            f"{data_and_context} (data times context parallel) or {data} (data parallel): ranks of other groups hold "
            "different parts of the model, or would drift apart"
        )
    return group


def check_grad_norm_groups(grad_norm_groups: RankLists | None) -> None:
    """Accept the documented lists: whatever they name, norms are summed over all ranks that hold parts of the model.

    Raises:
        ValueError: no group of the mesh is meant.
    """
    if grad_norm_groups is None:
        return
    ranks = _check_rank_lists("grad_norm_groups", grad_norm_groups)
    if _find(ranks, _NORM_AXES) is None and len(ranks[0]) > 1:
        raise ValueError(
            f"grad_norm_groups={_as_lists(ranks)} are not the tensor- or pipeline-parallel groups of "
            "the mesh; leave them out: which ranks hold which part of the model is known from the mesh"
        )


def _check_rank_lists(argument: str, groups: RankLists) -> tuple[tuple[int, ...], ...]:
    world_size = get_world_group().size if model_parallel_is_initialized() else 1
    ranks = tuple(tuple(group) for group in groups)
    if model_parallel_is_initialized() and len(set(all_gather_object(ranks, get_world_group()))) > 1:
        raise ValueError(f"{argument} differ between the ranks; give every rank the lists of all groups")
    lengths = {len(group) for group in ranks}
    if sorted(rank for group in ranks for rank in group) != list(range(world_size)) or len(lengths) != 1:
        raise ValueError(
            f"{argument}={_as_lists(ranks)} must name each of the {world_size} ranks once, in lists of one length"
        )
    return ranks


def _find(ranks: tuple[tuple[int, ...], ...], candidates: Sequence[tuple[str, ...]]) -> Group | None:
    wanted = {frozenset(group) for group in ranks}
    for axes in candidates:
        group = active_group(*axes)
        if {frozenset(replicas) for replicas in group.replica_groups} == wanted:
            return group
    return None


def _as_lists(groups: RankLists) -> list[list[int]]:
    return [list(group) for group in groups]
