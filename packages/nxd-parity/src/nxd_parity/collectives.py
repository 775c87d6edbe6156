"""Which collectives and messages of `torch.distributed` a program calls, in which order, over which ranks, and where.

Those of torch's own modules are seen where they call these functions by their module, as FSDP2 does, or are
functional collectives, as those of DTensor. DDP's and FSDP1's own are made in C++, and are not seen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_parity.events import CollectiveEvent
from nxd_parity.hooks import Progress, is_in_backward
from nxd_parity.replaced import replaced
from nxd_parity.writer import RankWriter

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
MESSAGES = ("send", "recv", "isend", "irecv")
FUNCTIONAL = {  # those that return their results, and what they are called here
    "all_reduce": "all_reduce",
    "all_gather_tensor": "all_gather_into_tensor",
    "all_gather_tensor_autograd": "all_gather_into_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd": "reduce_scatter_tensor",
    "all_to_all_single": "all_to_all_single",
    "all_to_all_single_autograd": "all_to_all_single",
    "broadcast": "broadcast",
}


@contextmanager
def collectives_recorded(writer: RankWriter, progress: Progress) -> Iterator[None]:
    """Record the calls in the `with` block."""
    if not dist.is_available():
        yield
        return
    from torch.distributed import _functional_collectives as functional  # noqa: PLC0415

    places: dict[tuple[Any, str], Callable[..., Any]] = {}
    for name in (*COLLECTIVES, *MESSAGES):
        original = getattr(dist, name)
        recorded = _recorded(original, name, writer, progress)
        places[dist, name] = _Function(original, recorded) if name in MESSAGES else recorded
    places[dist, "batch_isend_irecv"] = _recorded_batch(dist.batch_isend_irecv, writer, progress)
    for name, operation in FUNCTIONAL.items():
        if hasattr(functional, name):
            places[functional, name] = _recorded(getattr(functional, name), operation, writer, progress)
    with replaced(places):
        yield


class _Function:
    """A function of torch that is recorded, and is equal to it: batches of messages compare their functions."""

    def __init__(self, original: Callable[..., Any], recorded: Callable[..., Any]) -> None:
        self.original, self._recorded = original, recorded
        update_wrapper(self, original)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._recorded(*given, **named)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original

    def __hash__(self) -> int:
        return hash(self.original)


def _recorded_batch(original: Callable[..., Any], writer: RankWriter, progress: Progress) -> Callable[..., Any]:
    @wraps(original)
    def call(p2p_op_list: list[dist.P2POp]) -> Any:
        for message in p2p_op_list:
            if isinstance(message.op, _Function):
                message.op = message.op.original  # by whose identity the batch tells sends from receives
            ranks, tensor = (dist.get_rank(), message.peer), message.tensor
            dtype = str(tensor.dtype).removeprefix("torch.")
            writer.collective(CollectiveEvent(progress.step, message.op.__name__, ranks, tuple(tensor.shape), dtype))
        return original(p2p_op_list)

    return call


def _recorded(original: Callable[..., Any], name: str, writer: RankWriter, progress: Progress) -> Callable[..., Any]:
    @wraps(original)
    def call(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or not dist.is_initialized():
            return original(*given, **named)
        values = (*given, *named.values())
        tensor = next((it for it in values if isinstance(it, Tensor)), None)
        group = _group_of(original, given, named)
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
        if name in MESSAGES:
            ranks = (dist.get_rank(), *_peer(given, named, group))
        is_backward = is_in_backward()
        writer.collective(
            CollectiveEvent(
                progress.step,
                name,
                ranks,
                () if tensor is None else tuple(tensor.shape),
                "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
                _reduction(name, values),
                group="" if group is None else group.group_name,
                module=progress.in_backward if is_backward else progress.module,
                phase="backward" if is_backward else "forward" if progress.is_in_module else "",
            )
        )
        return original(*given, **named)

    return call


def _peer(given: Sequence[Any], named: Mapping[str, Any], group: Any) -> Sequence[int]:
    """Return the global rank of the other side of a message; nothing if it is any rank."""
    in_group = next((named[it] for it in ("group_dst", "group_src") if named.get(it) is not None), None)
    if in_group is not None:
        return [in_group if group is None else dist.get_global_rank(group, in_group)]
    return [it for it in (*given[1:2], named.get("dst"), named.get("src")) if isinstance(it, int)]


def _group_of(original: Callable[..., Any], given: Any, named: Mapping[str, Any]) -> Any:
    """Return the process group of a call; None if this rank is in none."""
    group = next((it for it in (*given, named.get("group")) if isinstance(it, dist.ProcessGroup)), None)
    if group is not None:
        return group
    if original.__module__ == "torch.distributed._functional_collectives":
        return _functional_group(original, given, named)
    is_none = any(it is dist.GroupMember.NON_GROUP_MEMBER for it in (*given, named.get("group")))
    return None if is_none else dist.group.WORLD


def _functional_group(original: Callable[..., Any], given: Any, named: Mapping[str, Any]) -> Any:
    """Return the process group of a functional collective, which may be given a mesh, or a mesh and a dim."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415

    for it in (named.get("group"), *given[1:]):
        if isinstance(it, DeviceMesh):
            return it.get_group()
        if isinstance(it, tuple) and len(it) == 2 and isinstance(it[0], DeviceMesh):
            return it[0].get_group(it[1])
    return None


def _reduction(name: str, values: Any) -> str:
    if not name.startswith(("all_reduce", "reduce")):
        return ""
    given = next((it for it in values if isinstance(it, dist.ReduceOp | dist.ReduceOp.RedOpType)), None)
    if given is None:
        return next((it.upper() for it in values if it in ("sum", "avg", "max", "min", "product")), "SUM")
    return str(given).rpartition(".")[2].rstrip(">")
