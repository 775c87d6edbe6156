"""Which collectives and messages of `torch.distributed` a program calls, in which order, over which ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import update_wrapper, wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nxd_parity.events import CollectiveEvent
from nxd_parity.hooks import Progress
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
)
MESSAGES = ("send", "recv", "isend", "irecv")


@contextmanager
def collectives_recorded(writer: RankWriter, progress: Progress) -> Iterator[None]:
    """Record the calls in the `with` block. Those inside DDP, FSDP and DTensor bypass these functions."""
    if not dist.is_available():
        yield
        return
    with ExitStack() as stack:
        for name in (*COLLECTIVES, *MESSAGES):
            original = getattr(dist, name)
            recorded = _recorded(original, name, writer, progress)
            setattr(dist, name, _Function(original, recorded) if name in MESSAGES else recorded)
            stack.callback(setattr, dist, name, original)
        batch = dist.batch_isend_irecv
        dist.batch_isend_irecv = _recorded_batch(batch, writer, progress)
        stack.callback(setattr, dist, "batch_isend_irecv", batch)
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
        tensor = next((it for it in (*given, *named.values()) if isinstance(it, Tensor)), None)
        group = next((it for it in (*given, *named.values()) if isinstance(it, dist.ProcessGroup)), None)
        reduction = next(
            (it for it in (*given, *named.values()) if isinstance(it, dist.ReduceOp | dist.ReduceOp.RedOpType)), None
        )
        if name in MESSAGES:
            ranks: tuple[int, ...] = (dist.get_rank(), *_peer(given, named, group))
        else:
            ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD)) if dist.is_initialized() else ()
        writer.collective(
            CollectiveEvent(
                progress.step,
                name,
                ranks,
                () if tensor is None else tuple(tensor.shape),
                "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
                _reduction(name, reduction),
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


def _reduction(name: str, given: Any) -> str:
    if not name.startswith(("all_reduce", "reduce")):
        return ""
    return "SUM" if given is None else str(given).rpartition(".")[2].rstrip(">")
