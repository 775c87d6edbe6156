"""Moving a model to a device without losing what its parameters know about themselves.

`Module.to` may replace parameters by new ones without their attributes (it does when the type of device changes
to XLA or away from meta), and unties shared ones. `move_model_to_device` keeps both.
"""

from typing import TypeVar

import torch
from torch import nn

from nxd_state.shard_spec import copy_parameter_attributes

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def move_model_to_device(model: ModuleT, device: torch.device | str) -> ModuleT:
    """Move parameters and buffers to `device`, in place, keeping shard metadata, ties and `requires_grad`.

    From the meta device the tensors come out uninitialised: fill them with an init function or a checkpoint.

    Returns:
        The model itself.
    """
    device = torch.device(device)
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _moved_parameter(parameter, device, moved)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in moved:
                    moved[id(buffer)] = _to_device(buffer, device)
                module._buffers[name] = moved[id(buffer)]
    return model


def _moved_parameter(parameter: nn.Parameter, device: torch.device, moved: dict[int, torch.Tensor]) -> nn.Parameter:
    found = moved.get(id(parameter))
    if isinstance(found, nn.Parameter):
        return found
    if parameter.device == device:
        moved[id(parameter)] = parameter
        return parameter
    with torch.no_grad():
        new = nn.Parameter(_to_device(parameter.detach(), device), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            new.grad = _to_device(parameter.grad, device)
    copy_parameter_attributes(parameter, new)
    moved[id(parameter)] = new
    # The caller's optimizer may hold the old parameter only through the model: keep its id from being reused.
    moved[id(new)] = new
    return new


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device.type == "meta" and device.type != "meta":
        return torch.empty_like(tensor, device=device)
    return tensor.to(device)
