"""The replica harness: a program for XLA on N ranks, each a process, whose steps run with XLA's collectives on a CPU.

Each rank records its graphs by torch-xla, as it would on an accelerator. Where a step ends (`step_boundary`) the ranks
hand in what they have recorded; the graphs must be the same to the letter, and one of them is compiled and run with N
replicas (`replica_executable`), each with its own rank's tensors. Then every rank goes on with its results. Only what
has no collective, as the copies of a checkpoint that is loaded, may differ: torch-xla runs that on each rank. To read
a tensor before it is computed is an error here: it would stall a device, and cut the step's graph in two.
"""

import atexit
import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nxd_state.testing.pool import RankPool
from nxd_state.testing.replica_executable import ReplicaExecutable
from nxd_state.xla_inspect.pending_graph import PendingGraph, is_pending, pending_graph, put_results

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
    """Processes of their own: torch's autograd knows no device that came after its first backward."""
    pool = RankPool()
    atexit.register(pool.shutdown)
    return pool


@dataclass(frozen=True)
class ExecutedGraph:
    """A graph that all ranks have run.

    Attributes:
        text: HLO, the same on every rank.
        is_new: whether it was the first of its kind and was compiled.
    """

    text: str
    is_new: bool


@dataclass
class _Job:
    executed: list[ExecutedGraph] = field(default_factory=list)
    compiled: dict[str, ReplicaExecutable | None] = field(default_factory=dict)  # by hash; None but on rank 0


_job = _Job()


def executed_graphs() -> list[ExecutedGraph]:
    """Those of the job under way so far, in order."""
    return list(_job.executed)


def _as_replica(fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    global _job  # noqa: PLW0603  (a worker is a rank of one job after the other)
    _job = _Job()
    with _boundaries_on_replicas(), _NoEarlyReads():
        return fn(*args)


@contextmanager
def _boundaries_on_replicas() -> Iterator[None]:
    import torch_xla  # noqa: PLC0415

    sync = torch_xla.sync
    sync()  # what an earlier job has left
    with mock.patch.object(torch_xla, "sync", functools.partial(_run_pending_graph, run_alone=sync)):
        yield


def _run_pending_graph(run_alone: Callable[[], None]) -> None:
    """In place of `torch_xla.sync`, which is `run_alone`; on every rank."""
    graph = pending_graph()
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, "" if graph is None else graph.text)
    if len(set(texts)) > 1 and not any(map(_COLLECTIVE.search, texts)):
        run_alone()
        return
    _check_same(texts)
    if graph is None:
        return
    key = hashlib.sha256(graph.text.encode()).hexdigest()
    _job.executed.append(ExecutedGraph(graph.text, key not in _job.compiled))
    put_results(graph.outputs, _execute(graph, key))


def _execute(graph: PendingGraph, key: str) -> list[Tensor]:
    """What the graph gives on this rank; rank 0 runs it for all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs: list[list[Tensor]] | None = [[]] * world_size if rank == 0 else None
    dist.gather_object(graph.inputs, inputs)
    results: list[Any] | None = None
    if inputs is not None:
        try:
            executable = _job.compiled.get(key) or ReplicaExecutable(graph.proto, world_size)
            _job.compiled[key] = executable
            results = executable.run(inputs)
        except Exception as error:  # which every rank is to raise, as all wait for results
            results = [RuntimeError(f"{type(error).__name__}: {error}")] * world_size
    _job.compiled.setdefault(key, None)
    own: list[Any] = [None]
    dist.scatter_object_list(own, results)
    if isinstance(own[0], Exception):
        raise own[0]
    return own[0]


_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(")


def _check_same(texts: list[str]) -> None:
    for rank, text in enumerate(texts):
        if text != texts[0]:
            lines, others = texts[0].splitlines()[1:], text.splitlines()[1:]  # but for the list of all parameters
            pairs = zip([*lines, "(end)"], [*others, "(end)"], strict=False)
            line, other = next((pair for pair in pairs if pair[0] != pair[1]), ("(end)", "(end)"))
            raise RuntimeError(
                f"rank {rank} recorded another graph than rank 0: {len(others)} lines instead of {len(lines)}, and "
                f"first\n  {other.strip()}\ninstead of\n  {line.strip()}\n"
                "A rank's index must come in as data: use Group.rank_tensor, not Group.rank"
            )


class _NoEarlyReads(TorchFunctionMode):
    """Raises where Python asks for a value of the device that is still to be computed.

    Not a dispatch mode, under which torch takes other ways to make views: the graph would be another one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].device.type == "xla" and _reads(func, args, kwargs):
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
        return target.device.type == "cpu"
    return isinstance(target, str | torch.device) and torch.device(target).type == "cpu"


def _check_computed(tensor: Tensor, func: Any) -> None:
    if is_pending(tensor):
        raise RuntimeError(
            f"{func.__name__}() reads a tensor of shape {tuple(tensor.shape)} on XLA that is not computed yet, which "
            "would stall the device and split the step's graph; read it after step_boundary()"
        )
