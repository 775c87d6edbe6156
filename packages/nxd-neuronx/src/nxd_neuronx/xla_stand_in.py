"""The functions of torch-xla that training scripts call, over torch.distributed, for machines without torch-xla.

Scripts for NeuronX Distributed import torch_xla for the device, ranks and a few collectives. `install` provides modules
with these names, so that such a script runs on the CPU, on CUDA and on the native Neuron device. There are no lazy
graphs: `mark_step` only runs the pending closures.

The interface is that of https://docs.pytorch.org/xla/ 2.9.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from nxd_state import get_device
from nxd_state.device import backend_of_device, device_type
from nxd_trace import prepare_workers
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from nxd_neuronx.neuron_stand_in import NEURON_MODULES, load_compiled
from nxd_neuronx.stand_in_modules import modules_in_place

T = TypeVar("T")
Groups = Sequence[Sequence[int]]

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mul": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_CHANGE_NUMBERS = (
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "XLA_USE_FP16",
    "XLA_DOWNCAST_FP16",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN",
)
_closures: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
_told_variables: set[str] = set()
_installed = ExitStack()  # undoes `install`
_made_groups: dict[tuple[dist.ProcessGroup, Groups], dist.ProcessGroup] = {}


def install() -> None:
    """Make `import torch_xla` work in this process, and map "xla" to the process's device and its backend.

    It lasts until `uninstall`: under `nxd run`, for the whole process. Applies to the workers of traced models too, and
    to the names of torch-neuronx that inference scripts import. An installed library is left alone.
    """
    prepare_workers(install)
    if importlib.util.find_spec("torch_neuronx") is None:
        _installed.enter_context(modules_in_place(NEURON_MODULES))
        _replace(torch.jit, "load", load_compiled)
    if importlib.util.find_spec("torch_xla") is None:
        _tell_of_variables()
        _installed.enter_context(modules_in_place(_MODULES))
        _replace(dist, "init_process_group", _init_process_group)
        _installed.enter_context(_DeviceNamedXla())


def uninstall() -> None:
    """Undo `install` in this process; workers of traced models are still prepared by it."""
    _installed.close()


def _replace(module: ModuleType, name: str, value: object) -> None:
    _installed.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _tell_of_variables() -> None:
    """Warn, on one rank, of variables that change results on torch-xla and Neuron and have no effect here.

    Called again when the script starts its process group, since scripts also set them themselves.
    """
    is_set = [name for name in _CHANGE_NUMBERS if os.environ.get(name, "0").lower() not in ("", "0", "false")]
    without = [name for name in is_set if name not in _told_variables]
    _told_variables.update(without)
    if without and _rank() == 0:
        named = ", ".join(f"{name}={os.environ[name]}" for name in without)
        print(
            f"nxd run: {named}: no effect without torch-xla, tensors keep their dtypes; for bfloat16 use "
            "mixed_precision_config of neuronx_distributed_config, or a model in bfloat16",
            file=sys.stderr,
        )


class _DeviceNamedXla(TorchFunctionMode):
    """Replaces "xla" by this process's device in calls of torch.

    torch disables a mode while a call that it intercepted runs. `loss.backward()` keeps it enabled, because
    recomputation of checkpointed modules runs code of the script there.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args = [get_device() if _is_xla(value) else value for value in args]
        kwargs = {key: get_device() if _is_xla(value) else value for key, value in (kwargs or {}).items()}
        if func is Tensor.backward and args[0].requires_grad and kwargs.get("inputs") is None:
            edge = get_gradient_edge(args[0])  # unlike a tensor, does not re-enter this method
            gradient = kwargs.pop("gradient", None)
            with self:
                return torch.autograd.backward(edge, gradient, **kwargs)
        return func(*args, **kwargs)


def _is_xla(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "xla") or (isinstance(value, str) and value == "xla")


_torch_init_process_group = dist.init_process_group


def _init_process_group(backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
    _tell_of_variables()
    if backend == "xla":
        backend, init_method = backend_of_device(), None  # "pjrt://" and "xla://" are for torch-xla only
    says_rank = args or {"store", "rank", "world_size"} & kwargs.keys() or "RANK" in os.environ
    if init_method in (None, "env://") and not says_rank:  # a single process without a launcher
        init_method, kwargs = None, kwargs | {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    _torch_init_process_group(backend, init_method, *args, **kwargs)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Return this process's device; the arguments have no effect."""
    return get_device()


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this is the first rank of its host, or of all with `local=False`."""
    return (_local_rank() if local else _rank()) == 0


def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    """Print on the first rank."""
    if is_master_ordinal(local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)


def add_step_closure(closure: Callable[..., object], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    """Call `closure(*args)` at the end of the step."""
    _closures.append((closure, args))


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """End the step: call its closures in order."""
    while _closures:
        closure, args = _closures.pop(0)
        closure(*args)


def wait_device_ops(devices: Sequence[Any] = ()) -> None:
    """Do nothing: reading a value waits for it."""


def set_rng_state(seed: int, device: Any = None) -> None:
    """Seed the random generators of this process and its device."""
    torch.manual_seed(seed)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait for all ranks; returns the payload of each."""
    return _gather_objects(payload)


def mesh_reduce(tag: str, data: T, reduce_fn: Callable[[list[T]], Any]) -> Any:
    """Apply `reduce_fn` to the list of all ranks' data."""
    return reduce_fn(_gather_objects(data))


def _gather_objects(value: T) -> list[T]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _process_group(groups: Groups | None) -> dist.ProcessGroup | None:
    """The group of this rank; all ranks request the same groups in the same order."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    if not groups:
        return world
    key = (world, tuple(tuple(group) for group in groups))
    if key not in _made_groups:
        made: list[tuple[Sequence[int], Any]] = [(group, dist.new_group(list(group))) for group in groups]
        _made_groups[key] = next(process_group for group, process_group in made if dist.get_rank() in group)
    return _made_groups[key]


def all_reduce(
    reduce_type: str,
    inputs: Tensor | Sequence[Tensor],
    scale: float = 1.0,
    groups: Groups | None = None,
    pin_layout: bool = True,
) -> Tensor | None:
    """Reduce a tensor and return it, or a list of tensors in place; results are multiplied by `scale`."""
    group = _process_group(groups)
    results = [inputs.detach().clone()] if isinstance(inputs, Tensor) else inputs
    for result in results:
        if group is not None:
            dist.all_reduce(result, _OPERATIONS[reduce_type], group=group)
        if scale != 1.0:
            result.mul_(scale)
    return results[0] if isinstance(inputs, Tensor) else None


def all_gather(
    value: Tensor, dim: int = 0, groups: Groups | None = None, output: Any = None, pin_layout: bool = True
) -> Tensor:
    """Concatenate the tensors of all ranks of the group along `dim`."""
    group = _process_group(groups)
    if group is None:
        return value.clone()
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce_scatter(
    reduce_type: str,
    input: Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups | None = None,
    output: Any = None,
    pin_layout: bool = True,
) -> Tensor:
    """Return this rank's part of the reduced tensor along `scatter_dim`."""
    reduced = all_reduce(reduce_type, input, scale, groups)
    assert reduced is not None
    group = _process_group(groups)
    return reduced.chunk(shard_count, scatter_dim)[0 if group is None else group.rank()].contiguous()


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: Groups | None = None, pin_layout: bool = True) -> None:
    """Average the gradients of the optimizer's parameters over the group."""
    group = _process_group(groups)
    parameters = [parameter for group_ in optimizer.param_groups for parameter in group_["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    all_reduce("sum", gradients, 1.0 if group is None else 1.0 / group.size(), groups)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Groups | None = None,
    pin_layout: bool = True,
) -> Any:
    """Average the gradients over the group, and call `optimizer.step`."""
    reduce_gradients(optimizer, groups)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return loss


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """`torch.save` on the first rank of each host, of all, or on every rank; returns once all ranks are done."""
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(data, file_or_path)
    rendezvous("torch_xla.core.xla_model.save")


class MpDeviceLoader:
    """Yields batches with their tensors on the device, and ends a step before each.

    Args:
        loader: iterable of batches: tensors, or dicts, lists and tuples of tensors.
        device: target device.
        kwargs: prefetch options of torch-xla; accepted without effect.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, **kwargs: Any) -> None:
        self._loader = loader
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            mark_step()
            yield _move(batch, self._device)
        mark_step()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError if the loader has no length


def _move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _move(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [_move(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def spawn(fn: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int | None = None, **kwargs: Any) -> None:
    """Call `fn(rank, *args)` in this process, one of those started by the launcher."""
    if nprocs not in (None, 1, _world_size()):
        raise RuntimeError(
            f"xmp.spawn(nprocs={nprocs}) without torch-xla: start the ranks with `nxd run --nproc {nprocs} SCRIPT`"
        )
    fn(_local_rank(), *args)


def _no_tpu() -> int:
    raise OSError("there is no TPU: torch-xla is not installed")  # the error that Lightning expects


_XLA_MODEL = {
    **{f"REDUCE_{name.upper()}": name for name in _OPERATIONS},
    **{
        function.__name__: function
        for function in (
            *(xla_device, is_master_ordinal, master_print, add_step_closure, mark_step, wait_device_ops, set_rng_state),
            *(rendezvous, mesh_reduce, all_reduce, all_gather, reduce_scatter, reduce_gradients, optimizer_step, save),
        )
    },
    "get_ordinal": _rank,
    "get_local_ordinal": _local_rank,
    "xrt_world_size": _world_size,
}
_MODULES: dict[str, dict[str, Any]] = {
    "torch_xla": {"__version__": "0", "device": xla_device, "sync": mark_step},
    "torch_xla.core": {},
    "torch_xla.core.xla_model": _XLA_MODEL,
    "torch_xla.runtime": {
        "world_size": _world_size,
        "global_ordinal": _rank,
        "local_ordinal": _local_rank,
        "device_type": lambda: device_type().upper(),
    },
    "torch_xla.distributed": {},
    "torch_xla.distributed.parallel_loader": {"MpDeviceLoader": MpDeviceLoader},
    "torch_xla.distributed.xla_backend": {},
    "torch_xla.distributed.xla_multiprocessing": {"spawn": spawn},
    "torch_xla.experimental": {},
    "torch_xla.experimental.tpu": {"version": _no_tpu},
    "torch_xla.experimental.pjrt_backend": {},
    "torch_xla.utils": {},
    "torch_xla.utils.checkpoint": {"checkpoint": checkpoint},
    "torch_xla.debug": {},
    "torch_xla.debug.metrics": {"metrics_report": str, "counter_names": list, "metric_names": list},
}
