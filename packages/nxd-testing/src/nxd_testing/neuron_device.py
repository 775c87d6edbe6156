"""A stand-in for torch's native `neuron` device, registered with torch like the real one, over this process's memory.

`register_neuron_device` makes `torch.device("neuron")` an accelerator of this process through torch's registration of
Python backends (PrivateUse1): no tensor subclass, no mode, no extension. A device tensor's storage wraps a CPU storage,
and operations run on the CPU on that memory. Results are therefore those of the CPU, and random numbers are those of a
CPU generator with the same seed. The process groups are in `neuron_ranks`.

The stand-in refuses what the real device does not support or computes differently (`REFUSED`), so that code that passes
on it does not rely on that. It does not model memory, speed, streams, rounding, or operations that the device lacks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "neuron"

# The reason by refused feature, with its documentation. AWS's pages are those of Neuron 2.33 (October 2026).
REFUSED = {
    "float64": "is computed in 32 bits there (torch-neuronx 2.13, tests and examples of 64-bit types)",
    "shapes that depend on data": "no graph has them (Neuron compiler error NCC_EMOD025; torch.compile reference)",
    "tensors of several devices": "as torch's own devices do; only 0-d tensors of the CPU are taken for numbers",
    "barriers of some ranks": "its barrier knows the world only (torch-neuronx, ProcessGroupNeuron.barrier)",
    "tensors of the CPU in process groups": "they carry the device's tensors only (ProcessGroupNeuron)",
    "uneven all-to-all": "its chunks are of one size (ProcessGroupNeuron.alltoall_base)",
}

_HOST = DispatchKeySet(DispatchKey.CPU)
# The operations of a transformer that autocast runs in its dtype, and in float32, as on the CPU.
_LOWERED = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention")
_RAISED = ("mse_loss", "nll_loss", "cross_entropy_loss")
_MOVES = {"aten::copy_", "aten::_copy_from", "aten::_to_copy", "aten::set_"}  # these take tensors of two devices


def register_neuron_device() -> None:
    """Make `neuron` the accelerator of this process, permanently. Calling it again does nothing.

    Call it before the first backward: autograd ignores devices that are registered later.

    Raises:
        RuntimeError: this version of torch cannot register Python devices.
    """
    if torch.__version__ < "2.13":
        raise RuntimeError(f"torch {torch.__version__} registers no device like {NAME!r}; install torch 2.13 or newer")
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_DeviceModule())
    _LIBRARY_OF_ALL.fallback(_run_on_host, "PrivateUse1")
    _LIBRARY_OF_ALL.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    _LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
    for overload in (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset):
        _LIBRARY.impl(overload, partial(overload.redispatch, _HOST), "PrivateUse1")
    torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[assignment,method-assign]  # torch's asks hooks in C++
    torch._tensor_str._str = _printed  # type: ignore[assignment]  # torch's computes in float64, with shapes that depend on the values
    for name in _LOWERED:
        _register_autocast(name, lambda: torch.get_autocast_dtype(NAME))
    for name in _RAISED:
        _register_autocast(name, lambda: torch.float32)


def register_neuron_compiler() -> None:
    """Make `neuron` a backend of torch.compile that runs the forward and backward graphs operation by operation.

    It refuses symbolic shapes (`torch.compile(dynamic=True)`). Importing torch's compiler takes seconds.
    """
    from torch._dynamo import list_backends, register_backend  # noqa: PLC0415
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415
    from torch._functorch.aot_autograd import make_boxed_func  # noqa: PLC0415

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        sizes = [size for value in inputs for size in (value.shape if isinstance(value, Tensor) else [value])]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise RuntimeError(
                f"symbolic shapes on {NAME!r}: {REFUSED['shapes that depend on data']}; use dynamic=False"
            )
        return make_boxed_func(graph.forward)

    if NAME not in list_backends():
        register_backend(aot_autograd(fw_compiler=compile_graph), name=NAME)


_LIBRARY_OF_ALL = torch.library.Library("_", "IMPL")
_LIBRARY = torch.library.Library("aten", "IMPL")


def is_on_device(value: object) -> bool:
    """Return whether the value is a tensor on the device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor that shares the memory of a device tensor."""
    memory = tensor.untyped_storage().memory  # type: ignore[attr-defined]
    host = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return host.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(tensor: Tensor, storage: torch.UntypedStorage | None = None) -> Tensor:
    """Return a device tensor that shares the memory of a CPU tensor, whose device storage, if any, is `storage`."""
    _check_dtype(tensor.dtype)
    empty = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
    return _set_storage(empty, storage or _device_storage(tensor.untyped_storage()), tensor)


def _device_storage(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    device = torch.device(NAME, 0)
    storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), device, memory.nbytes())
    storage.memory = memory  # keeps the memory alive as long as the device storage
    return storage


def _set_storage(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    changed: Tensor = set_.redispatch(_HOST, tensor, storage, like.storage_offset(), like.shape, like.stride())
    return changed


def _run_on_host(operation: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operation without a kernel of its own on the CPU."""
    _check_operation(operation, tree_leaves((args, kwargs)))
    originals: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the host tensor, valid while that is referenced
    storages: dict[int, torch.UntypedStorage] = {}

    def down(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        if not is_on_device(value):
            return value
        host = on_host(value)
        originals[id(host)] = (host, value)
        storages[host.untyped_storage()._cdata] = value.untyped_storage()
        return host

    def up(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)][1]
        return on_device(value, storages.get(value.untyped_storage()._cdata))

    host_args, host_kwargs = tree_map(down, (_with_tensors(operation, args), kwargs))
    with _generator_of_device() if torch.Tag.nondeterministic_seeded in operation.tags else _nothing():
        result = operation(*host_args, **host_kwargs)
    for host, original in originals.values():
        if host.shape != original.shape or host.stride() != original.stride():  # an `out` that was resized
            _set_storage(original, _device_storage(host.untyped_storage()), host)
    return tree_map(up, result)


def _with_tensors(operation: torch._ops.OpOverload, args: tuple[Any, ...]) -> list[Any]:
    """Return arguments with tensors in place of numbers, into which torch turns 0-d tensors on their way here."""
    kinds = [str(it.type) for it in operation._schema.arguments]
    return [
        torch.tensor(it) if kind == "Tensor" and isinstance(it, int | float) else it
        for it, kind in zip(args, kinds, strict=False)
    ]


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _check_dtype(source.dtype if is_on_device(source) else target.dtype)
    to = on_host(target) if is_on_device(target) else target
    to.copy_(on_host(source) if is_on_device(source) else source)
    return target


def _resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """Give memory back and take it again, as fully sharded parameters do: here what is given back reads as NaN."""
    if storage.device.type != NAME:
        return _torch_resize(storage, size)
    if size == 0:
        storage.memory.fill_(0xFF)  # type: ignore[attr-defined]
    elif size != storage.nbytes():
        raise RuntimeError(f"a storage of {storage.nbytes()} bytes on {NAME!r} is resized to {size}; make another one")
    return storage


_torch_resize = torch.UntypedStorage.resize_


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _printed(tensor: Tensor, **options: Any) -> str:
    if not is_on_device(tensor):
        return _torch_printed(tensor, **options)
    return f"{_torch_printed(on_host(tensor.detach()))[:-1]}, device='{tensor.device}')"


_torch_printed = torch._tensor_str._str


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype in (torch.float64, torch.complex128):
        raise TypeError(f"{dtype} on {NAME!r}: {REFUSED['float64']}; use torch.float32, or compute on the CPU")


def _check_operation(operation: torch._ops.OpOverload, leaves: list[Any]) -> None:
    name = operation._schema.name
    if torch.Tag.dynamic_output_shape in operation.tags and name != "aten::index":
        raise RuntimeError(f"{name} on {NAME!r}: {REFUSED['shapes that depend on data']}; mask values instead")
    if name == "aten::index" and any(is_on_device(leaf) and leaf.dtype == torch.bool for leaf in leaves[1:]):
        raise RuntimeError(f"a mask as index on {NAME!r}: {REFUSED['shapes that depend on data']}; use torch.where")
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_cpu and leaf.dim() and name not in _MOVES:
            raise RuntimeError(f"{name} of tensors on {NAME!r} and on the CPU: {REFUSED['tensors of several devices']}")


def _register_autocast(name: str, dtype: Callable[[], torch.dtype]) -> None:
    packet = getattr(torch.ops.aten, name)
    autocast = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]

    def cast(value: Any) -> Any:
        return value.to(dtype()) if is_on_device(value) and value.is_floating_point() else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            args, kwargs = tree_map(cast, (args, kwargs))
            return packet(*args, **kwargs)

    _LIBRARY.impl(packet.default, kernel, "AutocastPrivateUse1")


@contextmanager
def _generator_of_device() -> Iterator[None]:
    """Draw random numbers from the device's generator and leave the CPU's unchanged."""
    host = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(torch.get_rng_state())
        torch.set_rng_state(host)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


_generator = torch.Generator()


class _DeviceModule:
    """`torch.neuron`: the functions that torch requires of a device module. A process has one device."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: object = None) -> None:
        """Do nothing: operations run synchronously."""

    def manual_seed_all(self, seed: int) -> None:
        _generator.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> Tensor:
        return _generator.get_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        _generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
