"""Counts what a computation would do, operation by operation, while nothing is computed.

For tensors on the meta device. The memory of a computation is counted by nxd_pipeline's `StepMemory`; here it is cut
into the segments that somebody else marks, together with the work and the messages of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from nxd_pipeline.runtime.memory import StepMemory
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from nxd_trainer.plan.outcomes import Outcomes

aten = torch.ops.aten

# How often each rank sends its (size - 1)/size of the whole tensor: an all-reduce scatters it and gathers it again.
# A reduce-scatter on the CPU is an exchange of parts.
_PASSES = {
    "c10d.allreduce_": 2,
    "c10d._allgather_base_": 1,
    "c10d._reduce_scatter_base_": 1,
    "c10d.alltoall_base_": 1,
}
_WITHOUT_TRAFFIC = {aten._unsafe_view, aten.empty_like, aten.new_empty, aten.empty, aten.alias, aten.detach}
_PRODUCTS = {aten.mm: aten.mm, aten.addmm: aten.addmm, aten.addmm_: aten.addmm, aten.bmm: aten.bmm}
_ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu: (0, 4)}
_ATTENTION_BACKWARD = {aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 10)}


@dataclass(frozen=True)
class Operation:
    """What one operation computes, and moves between memory and the arithmetic units.

    Attributes:
        flops: of matrix products and attention; causal attention computes half of the scores. Others count none.
        bytes: of its inputs and outputs.
    """

    flops: int
    bytes: int


@dataclass
class Segment:
    """A part of a computation.

    Attributes:
        before: bytes of all tensors when it began.
        after: bytes of all tensors when it ended.
        peak: the most in between.
        operations: those that do something.
        messages: bytes that this rank sends in each collective.
        product_bytes: of the results of matrix products.
    """

    before: int
    after: int = 0
    peak: int = 0
    operations: list[Operation] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    product_bytes: int = 0


class OperationLog(StepMemory):
    """Inside, counts memory, and logs operations by segment.

    Args:
        outcomes: of operations that other logs have seen; this one adds to them.

    Attributes:
        segments: by the names that `begin` was given.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        super().__init__()
        self._outcomes = outcomes
        self.segments: dict[str, Segment] = {}
        self._current = Segment(0)

    def begin(self, name: str) -> None:
        """End the current segment and begin one that is called `name`."""
        self._current.after, self._current.peak = self.held_bytes, self.peak_bytes
        self.peak_bytes = self.held_bytes
        self._current = self.segments[name] = Segment(self.held_bytes)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # asks a tensor for its device
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(self._outcomes.of(func), types, args, kwargs)  # type: ignore[arg-type]
        packet = func.overloadpacket
        if func.namespace == "c10d":
            self._current.messages += _messages(str(packet), args, result)
        elif func.namespace == "aten" and not func.is_view and packet not in _WITHOUT_TRAFFIC:
            moved = sum(it.nbytes for it in tree_leaves((args, kwargs, result)) if isinstance(it, Tensor))
            self._current.operations.append(Operation(_flops(packet, args, result), moved))
            if packet in _PRODUCTS:
                self._current.product_bytes += result.nbytes
        return result


def _messages(packet: str, args: Sequence[Any], result: Any) -> list[int]:
    if packet not in _PASSES:
        return []
    leaves = tree_leaves((args, result))
    whole = max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    size = next(
        dist.ProcessGroup.unbox(leaf).size()
        for leaf in leaves
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
    )
    return [_PASSES[packet] * whole * (size - 1) // size]


def _flops(packet: Any, args: Sequence[Any], result: Any) -> int:
    if packet in _PRODUCTS:
        return int(flop_registry[_PRODUCTS[packet]](*args, out_val=result))
    for first_query, per_score in filter(None, (_ATTENTION.get(packet), _ATTENTION_BACKWARD.get(packet))):
        query, key = args[first_query], args[first_query + 1]
        causal = any(argument is True for argument in args)
        scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        return int(per_score * scores * query.shape[3] // (2 if causal else 1))
    return 0
