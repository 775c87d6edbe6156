"""Counts the work of a computation, operation by operation, without computing anything.

It works on tensors on the meta device. nxd_pipeline's `StepMemory` counts the memory of a computation; this module
splits it into segments that the caller marks, and adds the work and the messages of each.

torch computes in Python what an operation on such tensors returns, which dominates the run time, and a plan runs the
same layers many times. So `OperationCache` caches the result for each kind of inputs.
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

_GRADIENT_BYTES = 4  # ranks send gradients of keys and values in float32

# How often each rank sends its (size - 1)/size of the whole tensor: an all-reduce scatters and then gathers it.
# On the CPU, a reduce-scatter is an all-to-all.
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
        flops: FLOPs of a matrix product or attention; causal attention computes half of the scores. 0 for others.
        bytes: bytes of its inputs and outputs.
        keys: for attention, bytes of keys and values, which other context-parallel ranks need.
        key_gradients: for attention's backward, bytes of their gradients, which these ranks send back.
        queries: for attention, bytes of queries and outputs.
        heads: for attention, the numbers of query heads and key heads.
    """

    flops: int
    bytes: int
    keys: int = 0
    key_gradients: int = 0
    queries: int = 0
    heads: tuple[int, int] = (0, 0)


@dataclass
class WorkSegment:
    """A part of a computation.

    Attributes:
        before: bytes of all tensors at its start.
        after: bytes of all tensors at its end.
        peak: the maximum in between.
        operations: the operations with memory traffic.
        messages: bytes that this rank sends in each collective.
        to_experts: bytes that it sends in each exchange that moves tokens to their experts or back.
        product_bytes: bytes of the results of matrix products.
    """

    before: int
    after: int = 0
    peak: int = 0
    operations: list[Operation] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    to_experts: list[int] = field(default_factory=list)
    product_bytes: int = 0


class _MetaTensor(NamedTuple):
    """A tensor that an operation has created."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def like(cls, tensor: Tensor) -> "_MetaTensor":
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class OperationCache:
    """Cached results of operations on the meta device; called in place of the operations."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _MetaTensor | tuple[_MetaTensor, ...]] = {}

    def of(self, func: OpOverload) -> Callable[..., Any]:
        """Wrap an operation so that it runs once per kind of inputs, if all that it does is create tensors."""
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
                    self._known[key] = _MetaTensor.like(result) if alone else tuple(map(_MetaTensor.like, result))
                return result
            return known.again() if isinstance(known, _MetaTensor) else tuple(made.again() for made in known)

        return outcome


def _grouped_product(one: Tensor, other: Tensor, offsets: Tensor, *options: Any) -> Tensor:
    """Multiply matrices per group (expert); torch supports it on the meta device for bfloat16 only.

    Args:
        one: `[rows, inner]`, where each group has some of the rows, or some of `inner`.
        other: `[groups, inner, columns]`, or `[inner, columns]`.
        offsets: `[groups]`.
        *options: options that do not affect the shape.
    """
    of_each_group = other.dim() == 2
    return one.new_empty(
        (*offsets.shape, one.shape[0], other.shape[1]) if of_each_group else (one.shape[0], other.shape[2])
    )


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _MetaTensor.like(value), value.device
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_described, value))
    if isinstance(value, Mapping):
        return tuple((name, _described(it)) for name, it in value.items())
    return type(value), value  # 1 and 1.0 give tensors of different dtypes


def _is_new(result: Any, given: Any) -> bool:
    """Whether a result consists of meta tensors, each with its own memory."""
    made = [result] if isinstance(result, Tensor) else result
    if not isinstance(made, (list, tuple)) or not all(isinstance(it, Tensor) and it.is_meta for it in made):
        return False
    storages = [it.untyped_storage()._cdata for it in [*made, *tree_leaves(given)] if isinstance(it, Tensor)]
    own = storages[: len(made)]
    return len(set(own)) == len(own) and not set(own) & set(storages[len(made) :])


class OperationLog(StepMemory):
    """Inside, counts memory and logs operations by segment.

    Args:
        cache: cached results of operations, shared with other logs; this one adds to them.
        expert_group: name of the process group of the ranks with other experts, if no other axis has the same group.

    Attributes:
        segments: the segments, by the names passed to `begin`.
    """

    def __init__(self, cache: OperationCache, expert_group: str = "") -> None:
        super().__init__()
        self._cache, self._expert_group = cache, expert_group
        self.segments: dict[str, WorkSegment] = {}
        self._current = WorkSegment(0)

    def begin(self, name: str) -> None:
        """End the current segment and begin one named `name`."""
        self._current.after, self._current.peak = self.held_bytes, self.peak_bytes
        self.peak_bytes = self.held_bytes
        self._current = self.segments[name] = WorkSegment(self.held_bytes)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # queries a tensor's device
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(self._cache.of(func), types, args, kwargs)  # type: ignore[arg-type]
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
    """Whether an all-to-all specifies how much each rank gets."""
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
    """Return the context-parallel fields of `Operation`, as `nxd_layers.context` sends them."""
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
