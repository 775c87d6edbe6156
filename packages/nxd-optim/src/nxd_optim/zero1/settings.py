"""Arguments of ZeRO-1 and settings of parameter groups: checked, and carried between optimizers."""

from typing import Any

from torch import Tensor


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
