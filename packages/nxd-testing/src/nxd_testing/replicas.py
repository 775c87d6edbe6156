"""Replicas: an XLA program on N ranks, each a process, whose graphs run with XLA's collectives on the CPU.

Each rank records its graphs with torch-xla, as on an accelerator. At a `step_boundary` it synchronizes with the ranks
that its graph's collectives connect it to (`replica_meeting`); their graphs must be identical, and the first of these
ranks compiles one and runs it as N replicas with jaxlib's CPU client, each on its rank's tensors. (torch-xla's own CPU
client compiles a module per device, whose collectives never meet.) Pipeline stages may therefore run different graphs,
and graphs without collectives may differ on every rank. Reading a tensor before it is computed is an error: it would
stall a device and split the step's graph.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from nxd_doctor.graphs.pending_graph import PendingGraph, is_pending, pending_graph, put_results
from nxd_state.device import is_cpu, is_lazy_device, torch_xla_module
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.distributed_c10d import _get_default_store
from torch.overrides import TorchFunctionMode

from nxd_testing.pool import shared_pool
from nxd_testing.replica_meeting import Meetings, connected_ranks

T = TypeVar("T")


def run_on_replicas(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 300.0) -> list[T]:
    """Call `fn(*args)` on each of `world_size` ranks on XLA; see `run_on_ranks`. Needs torch-xla and jaxlib.

    Returned tensors must have been computed, that is, `step_boundary()` was called after them.

    Raises:
        RankFailure: a rank raised, for example because graphs differ, or a tensor was read too early.
    """
    return shared_pool("xla").run(_as_replica, world_size, fn, args, timeout=timeout, env=XLA_ON_THE_CPU)


XLA_ON_THE_CPU = {"NXD_DEVICE": "xla", "PJRT_DEVICE": "CPU"}


class ReplicaExecutable:
    """A compiled graph, given as a serialized `HloModuleProto`, that runs on `num_replicas` replicas at once.

    Raises:
        RuntimeError: jaxlib is not installed, or the compiler rejects the graph.
    """

    def __init__(self, proto: bytes, num_replicas: int) -> None:
        self._client, xla = _client_of(num_replicas), _jaxlib("xla_client")
        self._devices = self._client.devices()[:num_replicas]
        options = xla.CompileOptions()
        options.num_replicas, options.num_partitions = num_replicas, 1
        options.device_assignment = xla.DeviceAssignment.create(np.arange(num_replicas).reshape(-1, 1))
        debug_options = options.executable_build_options.debug_options
        debug_options.xla_backend_optimization_level = 0  # halves the compile time; the tensors are small
        debug_options.xla_llvm_disable_expensive_passes = True
        stable_hlo = _jaxlib("_jax").mlir.hlo_to_stablehlo(proto)
        self._executable = self._client.compile_and_load(stable_hlo, _device_list(self._devices), options)

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Run the graph: lists of parameters per replica to lists of results per replica, on the CPU."""
        arguments = [self._put(by_replica) for by_replica in zip(*inputs, strict=True)]
        results = self._executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [[_to_torch(by_replica[replica]) for by_replica in results] for replica in range(len(inputs))]

    def _put(self, tensors: Sequence[Tensor]) -> Any:
        """One array of the client with a separate value on each replica's device."""
        xla = _jaxlib("xla_client")
        values = [_to_numpy(tensor) for tensor in tensors]
        kind = SimpleNamespace(shape=values[0].shape, dtype=values[0].dtype, weak_type=False)
        parts = [
            xla.batched_device_put(kind, _replicated([device]), [value], [device], enable_x64=True)
            for value, device in zip(values, self._devices, strict=True)
        ]
        return xla.ArrayImpl(kind, _replicated(self._devices), parts, True, _skip_checks=True)


_clients: dict[int, Any] = {}


def _client_of(num_devices: int) -> Any:
    if num_devices not in _clients:
        _clients[num_devices] = _jaxlib("_jax").get_tfrt_cpu_client(num_devices=num_devices)
    return _clients[num_devices]


def _jaxlib(module: str) -> Any:
    try:
        return importlib.import_module(f"jaxlib.{module}")
    except ImportError as error:
        raise RuntimeError(
            "running a graph on replicas needs jaxlib, which is not installed; install jaxlib"
        ) from error


def _device_list(devices: Sequence[Any]) -> Any:
    return _jaxlib("_jax").DeviceList(tuple(devices))


def _replicated(devices: Sequence[Any]) -> Any:
    xla = _jaxlib("xla_client")
    return xla.GSPMDSharding(_device_list(devices), xla.HloSharding.replicate())


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype != torch.bfloat16:
        return tensor.detach().contiguous().numpy()
    bfloat16 = importlib.import_module("ml_dtypes").bfloat16  # a dependency of jaxlib
    return tensor.detach().contiguous().view(torch.int16).numpy().view(bfloat16)


def _to_torch(array: Any) -> Tensor:
    shared: Tensor = torch.from_dlpack(_jaxlib("_jax").buffer_to_dlpack_managed_tensor(array))
    return shared.clone()


@dataclass(frozen=True)
class ExecutedGraph:
    """A graph that this rank has run.

    Attributes:
        text: HLO, the same on all of `ranks`.
        is_new: whether it was run for the first time, and therefore compiled.
        ranks: the ranks that its collectives connect, including this one.
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
    """Return the graphs that the current job has run so far, in order."""
    return list(_job.executed)


def _as_replica(fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    global _job  # noqa: PLW0603  (a worker is a rank of one job after the other)
    _job = _Job(meetings := Meetings(_get_default_store(), dist.get_rank()))
    # With these hooks Python owns the tensors that autograd saves, so that pending_graph finds them.
    with _boundaries_on_replicas(), _NoEarlyReads(), saved_tensors_hooks(_same, _same):
        result = fn(*args)
    meetings.end()
    return result


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _boundaries_on_replicas() -> Iterator[None]:
    torch_xla = torch_xla_module()
    torch_xla.sync()  # pending operations of an earlier job
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
    """The graph's results on this rank; the first of the connected ranks runs it for all."""
    assert _job.meetings is not None
    if len(ranks) == 1:
        return _compiled(graph, 1).run([graph.inputs])[0]
    name = _job.meetings.meet(ranks, graph.text)
    inputs = _job.meetings.gather(name, ranks, graph.inputs)
    results: list[Any] | None = None
    if inputs is not None:
        try:
            results = _run(graph, ranks, inputs)
        except Exception as error:  # every rank raises it, because all wait for results
            results = [RuntimeError(f"{type(error).__name__}: {error}")] * len(ranks)
    own = _job.meetings.scatter(name, ranks, results)
    if isinstance(own, Exception):
        raise own
    return own


def _run(graph: PendingGraph, ranks: tuple[int, ...], inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    """The results of each of the ranks.

    Replica groups name ranks of the whole job, so there is a replica for each; those of other ranks run on arbitrary
    inputs, and their results are dropped.
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
    """Raises if Python reads a value of the device that has not been computed yet.

    Not a dispatch mode: under one, torch creates views differently, which changes the graph.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and is_lazy_device(args[0]) and _reads(func, args, kwargs):
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
    return isinstance(target, str | torch.device) and is_cpu(torch.device(target))


def _check_computed(tensor: Tensor, func: Any) -> None:
    if is_pending(tensor):
        raise RuntimeError(
            f"{func.__name__}() reads a tensor of shape {tuple(tensor.shape)} on XLA that is not computed yet, which "
            "would stall the device and split the step's graph; read it after step_boundary()"
        )
