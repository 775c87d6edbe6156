"""Moving a model to a device, or from the meta device, without losing its parameters' attributes and ties.

`Module.to` replaces parameters by new ones, without their attributes and unties shared ones, whenever old and new
tensor are of different kinds (away from meta, to XLA). `move_model_to_device` keeps both.
"""

import hashlib
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from nxd_state.shard_spec import get_shard_spec

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def move_model_to_device(model: ModuleT, device: torch.device | str) -> ModuleT:
    """Move parameters and buffers to `device`, in place, keeping attributes, ties, gradients and `requires_grad`.

    A parameter stays the same object where torch allows it, so that an existing optimizer still works; away
    from meta and to XLA it becomes a new one. From meta the tensors come out uninitialized: fill them with an init
    function or a checkpoint. Only those with padding come out as zeros.

    Returns:
        The model itself.
    """
    device = torch.device(device)
    moved: dict[Tensor, Tensor] = {}  # tensors are hashed by identity: one that is tied is moved once
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in moved:
                    moved[tensor] = _moved(tensor, device)
                tensors[name] = cast(nn.Parameter, moved[tensor])
    return model


@torch.no_grad()
def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    data = _to_device(tensor.detach(), device)
    spec = get_shard_spec(tensor)
    if tensor.is_meta and not data.is_meta and spec is not None and spec.has_padding:
        data.zero_()  # no checkpoint fills padding, and layers count on it being zero
    grad = None if tensor.grad is None else _to_device(tensor.grad, device)
    # What Module.to asks as well: whether the tensor may take over the other's memory.
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        new = tensor
    else:
        new = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
        new.__dict__.update(tensor.__dict__)
    new.grad = grad
    return new


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == "meta" and device.type != "meta":
        return torch.empty_like(tensor, device=device)
    return tensor.to(device)


@torch.no_grad()
def allocate_meta_tensor(tensor: Tensor) -> None:
    """Give a tensor on the meta device memory on the CPU; it stays the same object, with its attributes.

    Floating-point numbers begin as `nan`, so that an unset value is noticed; others as zero.
    """
    made = torch.empty_like(tensor, device="cpu")
    made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    if made.is_floating_point():
        made.fill_(torch.nan)
    else:
        made.zero_()
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)


def seed_of_module(seed: int, name: str) -> int:
    """A seed for the initial values of the module `name`, which depends on nothing else: below 2**63."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
