"""Settings of an optimizer's parameter groups (lr, betas, ...) in a form that fits any layout: by parameter names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nxd_state import active_group, all_gather_object
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_trainer.checkpoint import named_parameters

Settings = Mapping[str, Any]


def group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each group, on this rank.

    Raises:
        ValueError: the optimizer holds a parameter that is not the model's.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters(model)}
    strangers = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strangers:
        raise ValueError(
            f"the optimizer holds parameters of shape {strangers[:3]} that are not the model's; give the model that "
            "it was made for"
        )
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def gather_settings(names: Sequence[Sequence[str]], optimizer: Optimizer) -> list[dict[str, Any]]:
    """Index, names and settings of the groups of all stages. Called by all ranks of a pipeline."""
    own = [
        {"index": index, "names": list(group), "settings": settings_of(optimizer.param_groups[index])}
        for index, group in enumerate(names)
    ]
    return [entry for stage in all_gather_object(own, active_group("pp")) for entry in stage]


def settings_of(group: Settings) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def match_settings(stored: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[Settings]:
    """What was stored for each group of these names; a group that is empty here has that of its index.

    Raises:
        ValueError: nothing was stored for a group, or parameters of one group had several settings.
    """
    return [_match_group(stored, index, set(group)) for index, group in enumerate(names)]


def _match_group(stored: Sequence[Mapping[str, Any]], index: int, names: set[str]) -> Settings:
    found = [entry for entry in stored if names.intersection(entry["names"])]
    found = found or [entry for entry in stored if not names and entry["index"] == index]
    if not found:
        raise ValueError(
            f"the checkpoint has no settings for parameter group {index} with {sorted(names)[:3]}; "
            "give the optimizer that was saved, or leave it out"
        )
    settings: Settings = found[0]["settings"]
    if any(repr(entry["settings"]) != repr(settings) for entry in found):
        raise ValueError(
            f"parameters of group {index} ({sorted(names)[:3]}, ...) were in groups of different settings when saved; "
            "make the optimizer with the groups that it had then"
        )
    return settings


def apply_settings(settings: Sequence[Settings], optimizer: Optimizer) -> None:
    """Give each group its settings; what is a tensor, such as a learning rate on a device, stays one."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key] = torch.full_like(group[key], float(value))  # groups may share the one that is there
            else:
                group[key] = value
