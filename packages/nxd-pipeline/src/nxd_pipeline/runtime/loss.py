"""Which part of a model's output is its loss, and what becomes of the losses of the microbatches."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from nxd_state import Group, all_reduce, broadcast, transport_device
from torch import Tensor

LossSpec = Mapping[str, Any] | Sequence[Any] | None


def check_loss_spec(spec: LossSpec) -> None:
    """Check that a spec says where the loss is.

    Raises:
        ValueError: it is no tuple, list or mapping, or does not have one True.
    """
    if spec is None:
        return
    if not isinstance(spec, Mapping | tuple | list):
        raise ValueError(
            f"output_loss_value_spec={spec!r} is a {type(spec).__name__}; give a tuple or dict of the structure that "
            "the model returns, such as (True, False), or None if it returns the loss itself"
        )
    marked = _count_true(spec)
    if marked != 1:
        raise ValueError(f"output_loss_value_spec={spec} marks {marked} values; mark the loss, and only it, as True")


def pick_loss(output: Any, spec: LossSpec) -> Any:
    """The part of `output` at the place where `spec` has True; `output` itself where there is no spec.

    Raises:
        ValueError: `output` has nothing at that place.
    """
    if spec is None:
        return output
    key, inner = next((key, inner) for key, inner in _pairs(spec) if _count_true(inner))
    try:
        part = output[key]
    except (KeyError, IndexError, TypeError):
        raise ValueError(
            f"output_loss_value_spec={spec} has the loss at {key!r}, but the model returned {_described(output)}; "
            "give a spec of the structure that the model returns"
        ) from None
    return part if inner is True else pick_loss(part, inner)


def check_loss(loss: Any) -> Tensor:
    """The loss itself, if it is one.

    Raises:
        ValueError: it is no scalar tensor that needs gradients.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    raise ValueError(
        f"the loss is {_described(loss)}; expected a scalar tensor that depends on parameters. Say where in the "
        "model's output it is by output_loss_value_spec, such as (True, False) for (loss, logits)"
    )


def share_loss(loss: Tensor | None, pipeline: Group, replicas: Group, *, source: int) -> Tensor:
    """The loss that pipeline rank `source` has, averaged over the replicas, on every rank, in float64."""
    device = transport_device(pipeline)
    mine = (
        torch.zeros((), dtype=torch.float64, device=device)
        if loss is None
        else loss.detach().double().reshape(()).to(device)
    )
    return all_reduce(broadcast(mine, pipeline, source=source), replicas, op="avg")


def _pairs(spec: Mapping[str, Any] | Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return spec.items() if isinstance(spec, Mapping) else enumerate(spec)


def _count_true(spec: Any) -> int:
    if isinstance(spec, Mapping | tuple | list):
        return sum(_count_true(inner) for _, inner in _pairs(spec))
    return int(spec is True)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        grad = "needing gradients" if value.requires_grad else "needing no gradients"
        return f"a tensor of shape {tuple(value.shape)}, {grad}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {list(value)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
