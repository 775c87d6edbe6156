"""The replica harness: a program for XLA on N ranks, each a process, whose steps run with XLA's collectives on a CPU.

Each rank records its graphs by torch-xla, as it would on an accelerator. At a `step_boundary` it meets the ranks that
its graph's collectives connect it to (`replica_meeting`), if any; their graphs must be the same to the letter, and the
first of them compiles one and runs it as N replicas (`replica_executable`), each with its own rank's tensors. Then
every rank continues with its results. So stages of a pipeline may run different graphs, and graphs without collectives,
such as the copies made while loading a checkpoint, may differ on every rank. Reading a tensor before it is computed is
an error here: it would stall a device, and split the step's graph in two.
"""

import atexit
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from nxd_doctor.graphs.pending_graph import PendingGraph, is_pending, pending_graph, put_results
from nxd_state.device import is_host, records_graphs, torch_xla_module
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.distributed_c10d import _get_default_store
from torch.overrides import TorchFunctionMode

from nxd_testing.pool import RankPool
from nxd_testing.replica_executable import ReplicaExecutable
from nxd_testing.replica_meeting import Meetings, connected_ranks

T = TypeVar("T")


def run_on_replicas(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 300.0) -> list[T]:
    """Calls `fn(*args)` on each of `world_size` ranks on XLA; see `run_on_ranks`. Needs torch-xla and jaxlib.

    Tensors that it returns must have been computed: after a `step_boundary()`.

    Returns:
        What `fn` returned, by rank; tensors as detached CPU tensors.

    Raises:
        RankFailure: a rank raised; also where ranks recorded different graphs, or one read a tensor too early.
    """
    return _pool_of_replicas().run(_as_replica, world_size, fn, args, timeout=timeout, env=XLA_ON_THE_CPU)


XLA_ON_THE_CPU = {"NXD_DEVICE": "xla", "PJRT_DEVICE": "CPU"}


@functools.cache
def _pool_of_replicas() -> RankPool:
    """A pool with its own processes: torch's autograd ignores devices registered after its first backward."""
    pool = RankPool()
    atexit.register(pool.shutdown)
    return pool


@dataclass(frozen=True)
class ExecutedGraph:
    """A graph that this rank has run.

    Attributes:
        text: HLO, the same on all of `ranks`.
        is_new: whether it was the first of its kind and was compiled.
        ranks: those that its collectives connect, this one among them.
    """

    text: str
    is_new: bool
    ranks: tuple[int, ...]


@dataclass
class _Job:
    meetings: Meetings | None = None
    executed: list[ExecutedGraph] = field(default_factory=list)
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by text
    executables: dict[str, ReplicaExecutable] = field(default_factory=dict)  # by text, on the first of its ranks


_job = _Job()


def executed_graphs() -> list[ExecutedGraph]:
    """The graphs that the current job has run so far, in order."""
    return list(_job.executed)


def _as_replica(fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    global _job  # noqa: PLW0603  (a worker is a rank of one job after the other)
    _job = _Job(meetings := Meetings(_get_default_store(), dist.get_rank()))
    # By these hooks what autograd saves belongs to Python, where pending_graph finds it.
    with _boundaries_on_replicas(), _NoEarlyReads(), saved_tensors_hooks(_same, _same):
        result = fn(*args)
    meetings.end()
    return result


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _boundaries_on_replicas() -> Iterator[None]:
    torch_xla = torch_xla_module()
    torch_xla.sync()  # what an earlier job has left
    with mock.patch.object(torch_xla, "sync", _run_pending_graph):
        yield


def _run_pending_graph() -> None:
    """Replaces `torch_xla.sync`."""
    graph = pending_graph()
    if graph is None:
        return
    is_new = graph.text not in _job.ranks
    if is_new:
        _job.ranks[graph.text] = connected_ranks(graph.text, dist.get_rank(), dist.get_world_size())
    ranks = _job.ranks[graph.text]
    _job.executed.append(ExecutedGraph(graph.text, is_new, ranks))
    put_results(graph.outputs, _execute(graph, ranks))


def _execute(graph: PendingGraph, ranks: tuple[int, ...]) -> list[Tensor]:
    """The graph's results on this rank; the first of the ranks runs it for all."""
    assert _job.meetings is not None
    if len(ranks) == 1:
        return _compiled(graph, 1).run([graph.inputs])[0]
    name = _job.meetings.meet(ranks, graph.text)
    inputs = _job.meetings.gather(name, ranks, graph.inputs)
    results: list[Any] | None = None
    if inputs is not None:
        try:
            results = _run(graph, ranks, inputs)
        except Exception as error:  # which every rank is to raise, as all wait for results
            results = [RuntimeError(f"{type(error).__name__}: {error}")] * len(ranks)
    own = _job.meetings.scatter(name, ranks, results)
    if isinstance(own, Exception):
        raise own
    return own


def _run(graph: PendingGraph, ranks: tuple[int, ...], inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    """The results of each of the ranks.

    The collectives name ranks of the whole job. Those that are elsewhere compute as well, from any inputs: nobody looks
    at what they get.
    """
    by_rank = dict(zip(ranks, inputs, strict=True))
    world_size = dist.get_world_size()
    results = _compiled(graph, world_size).run([by_rank.get(rank, inputs[0]) for rank in range(world_size)])
    return [results[rank] for rank in ranks]


def _compiled(graph: PendingGraph, num_replicas: int) -> ReplicaExecutable:
    if graph.text not in _job.executables:
        _job.executables[graph.text] = ReplicaExecutable(graph.proto, num_replicas)
    return _job.executables[graph.text]


class _NoEarlyReads(TorchFunctionMode):
    """Raises where Python asks for a value of the device that is still to be computed.

    Not a dispatch mode, under which torch takes other ways to make views: the graph would be another one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and records_graphs(args[0]) and _reads(func, args, kwargs):
            _check_computed(args[0], func)
        return func(*args, **kwargs)


_READERS = {
    getattr(Tensor, name)
    for name in (
        *("__bool__", "__complex__", "__float__", "__index__", "__int__"),
        *("cpu", "equal", "is_nonzero", "item", "nonzero", "numpy", "tolist"),
    )
} | {torch.equal, torch.is_nonzero, torch.nonzero}


def _reads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is not Tensor.to:
        return func in _READERS
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(target, Tensor):
        return target.is_cpu
    return isinstance(target, str | torch.device) and is_host(torch.device(target))


def _check_computed(tensor: Tensor, func: Any) -> None:
    if is_pending(tensor):
        raise RuntimeError(
            f"{func.__name__}() reads a tensor of shape {tuple(tensor.shape)} on XLA that is not computed yet, which "
            "would stall the device and split the step's graph; read it after step_boundary()"
        )
