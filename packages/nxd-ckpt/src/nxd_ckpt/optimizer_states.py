"""States of optimizers: made where a checkpoint has them and the optimizer has none, and cut as its parameters are."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from nxd_ckpt.distributed_tensors import is_dtensor, local_box, local_tensor
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import Shard, ShardedTensor
from nxd_ckpt.tensor_subclasses import is_subclass


def by_owner(names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What lies below each path, by its last key."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in names.items():
        owner, _, key = name.rpartition(".")
        found[owner][key] = value
    return found


def fresh_states(path: str, optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """The states that an optimizer lacks, as it makes them itself: by a step with gradients of zero and a rate of zero.

    For states that are no tensors of their own but objects of classes that only the optimizer knows. It does not have
    them yet when this returns.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    lacking = [it for it in parameters if it.requires_grad and not optimizer.state.get(it)]
    gradients = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in lacking:
        parameter.grad = torch.zeros_like(parameter)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    try:
        optimizer.step()
    except Exception as error:  # whatever an optimizer raises
        raise ValueError(
            f"{path!r} has no states yet, and a step with gradients of zero, which makes them, failed with "
            f"{type(error).__name__}: {error}; take a step before you load"
        ) from error
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    return {parameter: dict(optimizer.state.pop(parameter, {})) for parameter in lacking}


def as_parameter_is_cut(path: str, part: Any, parameter: Any) -> Any:
    """A plain state of a parameter that is cut over ranks, as the same box."""
    if not is_dtensor(parameter) or is_dtensor(part) or not isinstance(part, torch.Tensor) or part.ndim == 0:
        return part
    box = local_box(parameter)
    if box is None or box.shape == tuple(parameter.shape):
        return part
    if part.numel() == 1 and tuple(part.shape) != box.shape:
        return part
    if tuple(part.shape) != box.shape or is_subclass(part):
        raise ValueError(
            f"{path!r} is a plain {type(part).__name__} {list(part.shape)} of a parameter {list(parameter.shape)} of "
            f"which this rank holds {list(box.shape)}: what other ranks have of it is not known. Make it a DTensor, "
            "with Replicate() if all ranks have it alike"
        )
    return ShardedTensor(parameter.shape, [Shard(part, box.offsets)] if box.num_elements else [], part.dtype)


def destination_of(present: Any, info: TensorInfo, parameter: Any, optimizer: Optimizer) -> torch.Tensor:
    """A tensor to load a state of a parameter into: the one that is there, or one cut like the parameter."""
    shapes = [info.global_shape]
    if is_dtensor(parameter) and tuple(parameter.shape) == info.global_shape:
        shapes.append(tuple(local_tensor(parameter).shape))
    if isinstance(present, torch.Tensor) and tuple(present.shape) in shapes and present.dtype == info.dtype:
        return present
    if tuple(parameter.shape) == info.global_shape:
        return torch.zeros_like(parameter, dtype=info.dtype, requires_grad=False)
    group = next(it for it in optimizer.param_groups if any(parameter is other for other in it["params"]))
    # Counts of steps are on the CPU, unless the step is one kernel or one graph.
    on_device = len(info.global_shape) > 0 or group.get("capturable") or group.get("fused")
    device = parameter.device if on_device else torch.device("cpu")
    return torch.zeros(info.global_shape, dtype=info.dtype, device=device)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group of parameters; what is a tensor, such as a learning rate, as a number."""
    options = {key: option for key, option in group.items() if key != "params"}
    return {key: option.item() if isinstance(option, torch.Tensor) else option for key, option in options.items()}


def set_groups(optimizer: Optimizer, here: list[dict[str, Any]], stored: Any) -> None:
    """Take over the options of the stored group that has a group's first parameter, or else of the one in its place."""
    for index, (group, own) in enumerate(zip(optimizer.param_groups, here, strict=True)):
        match = [it for it in stored if set(own["params"][:1]) & set(it["params"])] or stored[index : index + 1]
        for key, option in ({} if not match else match[0]).items():
            if key == "params":
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(option)
            else:
                group[key] = tuple(option) if isinstance(group.get(key), tuple) else option
