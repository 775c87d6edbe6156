"""The loss of a step: its place in the model's output, and what the microbatches' losses become."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nxd_state import (
    Group,
    all_reduce,
    broadcast,
    get_group,
    model_parallel_is_initialized,
    transport_device,
    widest_float,
)
from torch import Tensor

_LOSS_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

LossSpec = Mapping[str, Any] | Sequence[Any] | bool | None  # of bools only True


def check_loss_spec(spec: LossSpec) -> None:
    """Raise a ValueError unless a spec is True, None, or a tuple, list or mapping with one True."""
    if spec is None or spec is True:
        return
    if not isinstance(spec, Mapping | tuple | list):
        raise ValueError(
            f"output_loss_value_spec={spec!r} is a {type(spec).__name__}; pass a tuple or dict with the structure that "
            "the model returns, such as (True, False), or True if it returns the loss itself"
        )
    marked = _count_true(spec)
    if marked != 1:
        raise ValueError(f"output_loss_value_spec={spec} marks {marked} values as True; mark only the loss")


def pick_loss(output: Any, spec: LossSpec) -> Any:
    """Return the part of `output` where `spec` has True; `output` itself if `spec` is True or None.

    A position in a tuple also selects from the values of a dict, as for outputs of transformers.

    Raises:
        ValueError: `output` has no such element.
    """
    if spec is None or isinstance(spec, bool):
        return output
    key, inner = next((key, inner) for key, inner in _pairs(spec) if _count_true(inner))
    by_name = isinstance(output, Mapping) and isinstance(key, str)
    try:
        part = output[key] if by_name or not isinstance(output, Mapping) else list(output.values())[key]
    except (KeyError, IndexError, TypeError):
        raise ValueError(
            f"output_loss_value_spec={spec} has the loss at {key!r}, but the model returned {_described(output)}; "
            "pass a spec with the structure that the model returns"
        ) from None
    return part if inner is True else pick_loss(part, inner)


def check_loss(loss: Any) -> Tensor:
    """Return the loss; raises a ValueError unless it is a scalar tensor that needs gradients."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    raise ValueError(
        f"the loss is {_described(loss)}; expected a scalar tensor that depends on parameters. Specify its place in "
        "the model's output with output_loss_value_spec, such as (True, False) for (loss, logits)"
    )


def share_loss(loss: Tensor | None, pipeline: Group, replicas: Group, *, source: int) -> Tensor:
    """Return the loss of pipeline rank `source`, averaged over the replicas, on every rank and in its dtype.

    It is sent in the widest float, together with its dtype, because the other ranks of the pipeline know neither.
    """
    device = transport_device(pipeline)
    mine = torch.zeros(2, dtype=widest_float(device), device=device)
    if loss is not None:
        mine[0], mine[1] = loss.detach().reshape(()), _LOSS_DTYPES.index(loss.dtype)
    sent = broadcast(mine, pipeline, source=source)
    dtype = _LOSS_DTYPES[int(sent[1])]
    return all_reduce(sent[0], replicas, op="avg").to(dtype)


@dataclass(frozen=True)
class LossReport:
    """The results of `run_train` and `run_eval`.

    Attributes:
        spec: place of the loss in the model's output.
        per_microbatch: whether to return a list of the microbatches' losses instead of their mean.
        broadcast_and_average: whether every rank gets the mean, averaged over the data-parallel ranks.
        on_cpu: whether losses are returned as CPU tensors.
        pipeline: the group of the pipeline's ranks.
        last_rank: the pipeline rank of the last stage.
    """

    spec: LossSpec
    per_microbatch: bool
    broadcast_and_average: bool
    on_cpu: bool
    pipeline: Group
    last_rank: int

    def training_loss(self, output: Any) -> Tensor:
        """Return the loss in the model's output for a microbatch.

        Raises:
            ValueError: the output has no loss.
        """
        return check_loss(pick_loss(output, self.spec))

    def evaluated(self, output: Any) -> Any:
        """Return the loss if the output has one in its place, else the output."""
        try:
            loss = pick_loss(output, self.spec)
        except ValueError:  # no labels, no loss
            return output
        return loss if _is_loss(loss) else output

    def of_evaluation(self, results: Sequence[Any]) -> Any:
        """Return the result of `run_eval` from the results of `evaluated` for each microbatch on this rank."""
        is_loss = all(map(_is_loss, results))
        if self.broadcast_and_average:  # only the last stage's rank knows the output
            seen = torch.tensor(is_loss, device=transport_device(self.pipeline))
            is_loss = bool(broadcast(seen, self.pipeline, source=self.last_rank))
        return self.of_losses(results) if is_loss else results or None

    def of_losses(self, losses: Sequence[Tensor]) -> Tensor | list[Tensor] | None:
        """Return the result of `run_train` from the microbatches' losses on this rank."""
        if self.on_cpu:
            losses = [loss.cpu() for loss in losses]
        if self.per_microbatch:
            return list(losses) or None
        mean = torch.stack([loss.reshape(()) for loss in losses]).mean() if losses else None
        if not self.broadcast_and_average:
            return mean
        replicas = get_group("dp") if model_parallel_is_initialized() else Group.solo("dp")
        mean = share_loss(mean, self.pipeline, replicas, source=self.last_rank)
        return mean.cpu() if self.on_cpu else mean


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


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
