"""Counts the work of a computation, operation by operation, without computing anything.

For tensors on the meta device. nxd_pipeline's `StepMemory` counts the memory of a computation; this module divides it
into segments that the caller marks, together with the work and the messages of each.

torch works out in Python what an operation on such tensors returns, which takes longer than everything else about it,
and a plan runs the same layers many times: so `Outcomes` works it out once for each kind of inputs.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from nxd_pipeline.runtime.memory import StepMemory
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_GRADIENT_BYTES = 4  # in which ranks send gradients of keys and values

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
    """The arithmetic and the memory traffic of one operation.

    Attributes:
        flops: of matrix products and attention; causal attention computes half of the scores. Others count none.
        bytes: of its inputs and outputs.
        keys: of attention: bytes of keys and values, which other context-parallel ranks need.
        key_gradients: of the backward of attention: bytes of their gradients, which these ranks give back.
        queries: of attention: bytes of queries and outputs.
        heads: of attention: number of query heads and of key heads.
    """

    flops: int
    bytes: int
    keys: int = 0
    key_gradients: int = 0
    queries: int = 0
    heads: tuple[int, int] = (0, 0)


@dataclass
class Segment:
    """A part of a computation.

    Attributes:
        before: bytes of all tensors when it began.
        after: bytes of all tensors when it ended.
        peak: the most in between.
        operations: those that do something.
        messages: bytes that this rank sends in each collective.
        to_experts: bytes that it sends in each exchange by which tokens go to their experts, and back.
        product_bytes: of the results of matrix products.
    """

    before: int
    after: int = 0
    peak: int = 0
    operations: list[Operation] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    to_experts: list[int] = field(default_factory=list)
    product_bytes: int = 0


class _Made(NamedTuple):
    """A tensor that an operation has made."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> "_Made":
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Outcomes:
    """Cached results of operations on the meta device; called in place of the operations."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Made | tuple[_Made, ...]] = {}

    def of(self, func: OpOverload) -> Callable[..., Any]:
        """The operation, which is run only for inputs that it has not had yet, if all that it does is make tensors."""
        if func is aten._grouped_mm.default:
            return _grouped_product
        if func.namespace != "aten" or func.is_view or func._schema.is_mutable:
            return func

        def outcome(*args: Any, **kwargs: Any) -> Any:
            key = (func, _described(args), _described(kwargs))
            known = self._known.get(key)
            if known is None:
                result = func(*args, **kwargs)
                if _is_new(result, (args, kwargs)):
                    alone = isinstance(result, Tensor)
                    self._known[key] = _Made.like(result) if alone else tuple(map(_Made.like, result))
                return result
            return known.again() if isinstance(known, _Made) else tuple(made.again() for made in known)

        return outcome


def _grouped_product(one: Tensor, other: Tensor, offsets: Tensor, *options: Any) -> Tensor:
    """A product of matrices for each group, or expert; torch has it without memory for bfloat16 only.

    Args:
        one: `[rows, inner]`, where groups have rows of it; or `[rows, inner]` where they have parts of `inner`.
        other: `[groups, inner, columns]`, or `[inner, columns]`.
        offsets: `[groups]`.
        *options: which say nothing of the shape.
    """
    of_each_group = other.dim() == 2
    return one.new_empty(
        (*offsets.shape, one.shape[0], other.shape[1]) if of_each_group else (one.shape[0], other.shape[2])
    )


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _Made.like(value), value.device
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_described, value))
    if isinstance(value, Mapping):
        return tuple((name, _described(it)) for name, it in value.items())
    return type(value), value  # 1 and 1.0 give tensors of other types


def _is_new(result: Any, given: Any) -> bool:
    """Whether a result is tensors on the meta device, each with memory of its own."""
    made = [result] if isinstance(result, Tensor) else result
    if not isinstance(made, (list, tuple)) or not all(isinstance(it, Tensor) and it.is_meta for it in made):
        return False
    storages = [it.untyped_storage()._cdata for it in [*made, *tree_leaves(given)] if isinstance(it, Tensor)]
    own = storages[: len(made)]
    return len(set(own)) == len(own) and not set(own) & set(storages[len(made) :])


class OperationLog(StepMemory):
    """Inside, counts memory, and logs operations by segment.

    Args:
        outcomes: of operations that other logs have seen; this one adds to them.
        expert_group: name of the process group of the ranks with other experts, where it is that of no other axis.

    Attributes:
        segments: by the names that `begin` was given.
    """

    def __init__(self, outcomes: Outcomes, expert_group: str = "") -> None:
        super().__init__()
        self._outcomes, self._expert_group = outcomes, expert_group
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
            group = _group_of((args, result))
            to_experts = _is_uneven(str(packet), args) or (group and group.group_name == self._expert_group)
            kind = self._current.to_experts if to_experts else self._current.messages
            kind += _messages(str(packet), group, (args, result))
        elif func.namespace == "aten" and not func.is_view and packet not in _WITHOUT_TRAFFIC:
            moved = sum(it.nbytes for it in tree_leaves((args, kwargs, result)) if isinstance(it, Tensor))
            self._current.operations.append(Operation(_flops(packet, args, result), moved, *_traffic(packet, args)))
            if packet in _PRODUCTS or packet is aten._grouped_mm:
                self._current.product_bytes += result.nbytes
        return result


def _is_uneven(packet: str, args: Sequence[Any]) -> bool:
    """Whether an exchange says how much each rank gets."""
    return packet == "c10d.alltoall_base_" and any(isinstance(it, list) and it for it in args)


def _group_of(tensors_and_more: Any) -> dist.ProcessGroup | None:
    for leaf in tree_leaves(tensors_and_more):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf)
    return None


def _messages(packet: str, group: dist.ProcessGroup | None, tensors_and_more: Any) -> list[int]:
    if packet not in _PASSES or group is None:
        return []
    whole = max(leaf.nbytes for leaf in tree_leaves(tensors_and_more) if isinstance(leaf, Tensor))
    return [_PASSES[packet] * whole * (group.size() - 1) // group.size()]


def _traffic(packet: Any, args: Sequence[Any]) -> tuple[int, int, int, tuple[int, int]]:
    """Of attention over context-parallel ranks, as `nxd_layers.context` has it."""
    if packet not in _ATTENTION and packet not in _ATTENTION_BACKWARD:
        return 0, 0, 0, (0, 0)
    first, _ = (_ATTENTION | _ATTENTION_BACKWARD)[packet]
    query, key, value = args[first : first + 3]
    keys = key.nbytes + value.nbytes
    gradients = (key.numel() + value.numel()) * _GRADIENT_BYTES if packet in _ATTENTION_BACKWARD else 0
    return keys, gradients, 2 * query.nbytes, (query.shape[1], key.shape[1])


def _flops(packet: Any, args: Sequence[Any], result: Any) -> int:
    if packet in _PRODUCTS:
        return int(flop_registry[_PRODUCTS[packet]](*args, out_val=result))
    if packet is aten._grouped_mm:  # each token is in one group
        return int(2 * args[0].numel() * result.shape[-1])
    for first_query, per_score in filter(None, (_ATTENTION.get(packet), _ATTENTION_BACKWARD.get(packet))):
        query, key = args[first_query], args[first_query + 1]
        causal = any(argument is True for argument in args)
        scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        return int(per_score * scores * query.shape[3] // (2 if causal else 1))
    return 0
