"""Which collectives and messages of `torch.distributed` a program calls, in which order, over which ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
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
MESSAGES = ("send", "recv")  # batches of messages compare their functions by identity


@contextmanager
def collectives_recorded(writer: RankWriter, progress: Progress) -> Iterator[None]:
    """Record the calls in the `with` block. Those inside DDP, FSDP and DTensor bypass these functions."""
    if not dist.is_available():
        yield
        return
    with ExitStack() as stack:
        for name in (*COLLECTIVES, *MESSAGES):
            original = getattr(dist, name)
            setattr(dist, name, _recorded(original, name, writer, progress))
            stack.callback(setattr, dist, name, original)
        yield


def _recorded(original: Callable[..., Any], name: str, writer: RankWriter, progress: Progress) -> Callable[..., Any]:
    @wraps(original)
    def call(*given: Any, **named: Any) -> Any:
        tensor = next((it for it in (*given, *named.values()) if isinstance(it, Tensor)), None)
        group = next((it for it in (*given, *named.values()) if isinstance(it, dist.ProcessGroup)), None)
        reduction = next(
            (it for it in (*given, *named.values()) if isinstance(it, dist.ReduceOp | dist.ReduceOp.RedOpType)), None
        )
        if name in MESSAGES:
            peer = next((it for it in (*given[1:], *named.values()) if isinstance(it, int)), 0)
            ranks: tuple[int, ...] = (dist.get_rank(), peer)
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


def _reduction(name: str, given: Any) -> str:
    if not name.startswith(("all_reduce", "reduce")):
        return ""
    return "SUM" if given is None else str(given).rpartition(".")[2].rstrip(">")
