"""Ranks on the stand-in for the `neuron` device: its process groups, and `run_on_neuron`.

The process groups are gloo on the memory of the device's tensors. As in torch-neuronx, the process group is written in
Python, replaces all backends, and does not accept CPU tensors.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_map

from nxd_testing.gloo_group import GlooProcessGroup
from nxd_testing.neuron_device import NAME, REFUSED, on_host, register_neuron_device
from nxd_testing.pool import shared_pool

T = TypeVar("T")


def run_on_neuron(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 120.0) -> list[T]:
    """Call `fn(*args)` on each of `world_size` ranks on the stand-in, with `NXD_DEVICE=neuron`; see `run_on_ranks`.

    Raises:
        RankFailure: a rank raised, for example because the real device does not support an operation.
    """
    return shared_pool("neuron").run(_as_neuron_rank, world_size, fn, args, timeout=timeout, env={"NXD_DEVICE": NAME})


def _as_neuron_rank(fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    register_neuron_ranks()
    torch.manual_seed(0)  # seeds the device too
    dist.barrier()  # a rank must not close connections that others are still opening
    dist.destroy_process_group()  # the CPU's, which the pool created
    dist.init_process_group(NAME)
    return fn(*args)


def register_neuron_ranks() -> None:
    """Make `neuron` the accelerator of this process, with process groups of that name; see `register_neuron_device`."""
    register_neuron_device()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch's flight recorder takes no group written in Python
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, NeuronProcessGroup, devices=[NAME])
        for name, kernel in _IN_GRAPHS.items():
            _GRAPH_LIBRARY.impl(name, kernel, "PrivateUse1")


def _all_reduce(tensor: Tensor, operation: str, group_name: Any) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, _REDUCTIONS[operation], group=_resolve_process_group(group_name))
    return result


def _all_gather(tensor: Tensor, size: int, group_name: Any) -> Tensor:
    result = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
    _resolve_process_group(group_name)._allgather_base(result, tensor.contiguous()).wait()
    return result


def _reduce_scatter(tensor: Tensor, operation: str, size: int, group_name: Any) -> Tensor:
    result = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
    options = dist.ReduceScatterOptions()
    options.reduceOp = _REDUCTIONS[operation]
    _resolve_process_group(group_name)._reduce_scatter_base(result, tensor.contiguous(), options).wait()
    return result


# The collectives of compiled graphs for which torch-neuronx has kernels.
_GRAPH_LIBRARY = torch.library.Library("_c10d_functional", "IMPL")
_IN_GRAPHS = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
}
_REDUCTIONS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _memory(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.device.type != NAME:
        reason = REFUSED["tensors of the CPU in process groups"]
        raise RuntimeError(f"a tensor on {value.device} in a process group of {NAME!r}: {reason}")
    return on_host(value)


class NeuronProcessGroup(GlooProcessGroup):
    """A process group of the backend "neuron"."""

    backend_name = NAME
    device_kinds = (NAME,)

    def carry(self, method: str, args: Any, kwargs: Any) -> dist.Work:
        """Let gloo work on the memory of the device's tensors."""
        args, kwargs = tree_map(_memory, (args, kwargs))
        work: dist.Work = getattr(self.gloo, method)(*args, **kwargs)
        return work

    def alltoall_base(self, output: Tensor, given: Tensor, output_sizes: Any, sizes: Any, *_: Any) -> Any:
        """Exchange chunks of equal size; raises a NotImplementedError if the sizes differ."""
        if len({*output_sizes, *sizes}) > 1:
            raise NotImplementedError(f"chunks of {list(sizes)}: {REFUSED['uneven all-to-all']}")
        return self.gloo.alltoall_base(_memory(output), _memory(given), output_sizes, sizes)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks of the world; raises a NotImplementedError for any other group."""
        if self.size() != dist.get_world_size():
            raise NotImplementedError(f"a barrier of {self.size()} ranks: {REFUSED['barriers of some ranks']}")
        return super().barrier(opts)


NeuronProcessGroup.all_to_all_single = NeuronProcessGroup.alltoall_base  # type: ignore[method-assign, assignment]
