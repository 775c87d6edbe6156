"""Which device this process computes on, the torch.distributed backend that goes with it, and what it can do.

A device is the CPU, an accelerator of torch (CUDA, or the native `neuron` device), or one of torch-xla. Accelerators
are asked through torch's generic interface. Code outside this file asks for traits (`is_lazy_device`, `is_cpu`, ...),
not for names. Copies between host and device for which the host does not wait are here as well.

The choice: `NXD_DEVICE` if set (`NXD_CPU_MODE=1` is the older spelling of `NXD_DEVICE=cpu`), else XLA when
`PJRT_DEVICE` or a Neuron device says so, else the accelerator, else the CPU.
"""

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_state.neuron_errors import device_errors

_logger = logging.getLogger(__name__)

ACCELERATORS = ("cuda", "neuron")
DEVICE_TYPES = ("cpu", "xla", *ACCELERATORS)

DeviceLike = Tensor | torch.device | str | None  # a tensor, a device or a device's type; this process's device if None

_static_shapes: ContextVar[bool] = ContextVar("static_shapes", default=False)


def device_type() -> str:
    """Type of this process's device: "cpu", "xla", or an accelerator's, "cuda" or "neuron".

    Raises:
        ValueError: `NXD_DEVICE` names a type that is not known.
        RuntimeError: the environment asks for a device that is not available.
    """
    asked = "cpu" if os.environ.get("NXD_CPU_MODE") == "1" else os.environ.get("NXD_DEVICE", "")
    if asked:
        return _check_asked(asked)
    if "PJRT_DEVICE" in os.environ:
        if not has_torch_xla():
            raise RuntimeError(
                f"PJRT_DEVICE={os.environ['PJRT_DEVICE']} asks for torch-xla, which is not installed; "
                "install torch_xla, or unset PJRT_DEVICE, or set NXD_DEVICE=cpu"
            )
        return "xla"
    if Path("/dev/neuron0").exists():
        if has_torch_xla():
            return "xla"
        _load_torch_neuronx()
    kind = _accelerator()
    return kind if kind in ACCELERATORS else "cpu"


def get_device() -> torch.device:
    """This process's device: the accelerator's device with the index `LOCAL_RANK`, or the only visible device; the XLA
    device; or the CPU.

    Raises:
        RuntimeError: this host has fewer devices than ranks.
    """
    kind = device_type()
    if kind == "xla":
        return torch.device(torch_xla_module().device())
    if kind == "cpu":
        return torch.device(kind)
    count = torch.accelerator.device_count()
    index = 0 if count == 1 else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise RuntimeError(
            f"LOCAL_RANK={index}, but this host has {count} {kind} devices; start at most {count} ranks on it, or set "
            "NXD_DEVICE=cpu"
        )
    return torch.device(kind, index)


def backend_of_device() -> str:
    """The torch.distributed backend for tensors of this process's device: "gloo", "nccl" or "neuron".

    On XLA it carries tensors on the host; torch-xla carries those on the device.
    """
    kind = device_type()
    return "gloo" if kind in ("cpu", "xla") else dist.get_default_backend_for_device(kind)


def set_current_device() -> None:
    """Make this process's device the current one of its accelerator; elsewhere it does nothing."""
    device = get_device()
    if device.type in ACCELERATORS:
        torch.accelerator.set_device_index(device.index)


def is_lazy_device(what: DeviceLike = None) -> bool:
    """Whether a device records operations into a graph, which it compiles and runs later, as XLA devices do.

    Consequences on such a device: all ranks have to record the same graph, so a rank may differ in data only;
    reading a value waits for the whole graph; backward only records, so that no hook can overlap it with messages;
    messages block; and tensors have no memory that views could share.
    """
    return _type_of(what) == "xla"


def is_cpu(what: DeviceLike = None) -> bool:
    """Whether a device is the CPU: values can be read at once, and an operation that has returned is done."""
    return _type_of(what) == "cpu"


def has_streams(what: DeviceLike = None) -> bool:
    """Whether a device has streams: copies from and to pinned host memory run in the background."""
    kind = _type_of(what)
    return kind in ACCELERATORS and kind == _accelerator() and _has_pinned_memory_and_events(kind)


def has_fused_optimizers(what: DeviceLike = None) -> bool:
    """Whether torch's optimizers have kernels for a device that update all parameters at once (`fused=True`)."""
    return _type_of(what) in ("cpu", "cuda")


def has_fused_attention(what: DeviceLike = None) -> bool:
    """Whether torch's memory-efficient and flex attention run on a device; on AMD's they have another layout."""
    return _type_of(what) == "cuda" and torch.version.hip is None


def has_flash_attention(what: DeviceLike = None) -> bool:
    """Whether torch's flash attention runs on a device: it needs compute capability 8.0, of Ampere."""
    return has_fused_attention(what) and _compute_capability(what) >= (8, 0)


def has_grouped_product(dtype: torch.dtype, what: DeviceLike = None) -> bool:
    """Whether a device has torch's grouped matrix product of a dtype."""
    kind = _type_of(what)
    if kind == "cuda" and torch.__version__ < "2.15":
        return dtype == torch.bfloat16
    return kind in ("cpu", "cuda") and dtype in (torch.bfloat16, torch.float16, torch.float32)


def log_slow_path(what: str, device: torch.device) -> None:
    """Log once that an accelerator computes something in a slow way. On the CPU it does nothing.

    Args:
        what: what is slow, why, and what would be faster.
        device: where it is computed.
    """
    if device.type in ACCELERATORS:
        _log_once(f"slow on {device.type}: {what}")


def has_uneven_all_to_all(what: DeviceLike = None) -> bool:
    """Whether an all-to-all of a process group accepts chunks of different sizes on a device."""
    return _type_of(what) in ("cuda", "meta")  # of meta tensors nothing is sent


def has_dynamic_shapes(what: DeviceLike = None) -> bool:
    """Whether shapes may depend on values on a device, as that of `nonzero` does; on Neuron devices they may not."""
    return not _static_shapes.get() and _type_of(what) not in ("xla", "neuron")


@contextmanager
def static_shapes() -> Iterator[None]:
    """A context in which shapes may not depend on values on any device, to plan or test code for Neuron devices."""
    token = _static_shapes.set(True)
    try:
        yield
    finally:
        _static_shapes.reset(token)


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64; Neuron devices do not, and neither do Apple's."""
    return device.type in ("cpu", "cuda")


def widest_float(device: torch.device) -> torch.dtype:
    """The dtype for long sums on a device: float64, or float32 if it has no float64."""
    return torch.float64 if has_float64(device) else torch.float32


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 if its dtype is narrower, else itself."""
    return tensor.float() if tensor.itemsize < 4 else tensor


def compile_backend(what: DeviceLike = None) -> str:
    """The backend of torch.compile for a device: its own if it has one, like `neuron`, else "inductor"."""
    return "neuron" if _type_of(what) == "neuron" else "inductor"


def autocast_devices() -> tuple[str, ...]:
    """The types of devices on which torch.autocast is enabled now."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu", "xla"] if accelerator is None else ["cpu", "xla", accelerator.type]
    return tuple(kind for kind in kinds if torch.is_autocast_enabled(kind))


def peak_memory_bytes(device: torch.device) -> int | None:
    """The peak memory of a device used by tensors of this process; None if torch does not count it."""
    if device.type not in ACCELERATORS:
        return None
    try:
        return torch.accelerator.max_memory_allocated(device)
    except RuntimeError:  # the accelerator has an allocator of its own
        return None


def seed_device(seed: int) -> None:
    """Seed the random numbers of this process's device where `torch.manual_seed` does not, which is on XLA."""
    if is_lazy_device():
        torch_xla_module("core.xla_model").set_rng_state(seed)


def device_rng_state() -> dict[str, Tensor]:
    """The state of the device's random numbers, uint8, by its type; empty on the CPU."""
    kind = device_type()
    if kind == "xla":  # a number on the host: reading it does not wait for the device
        seed = torch_xla_module("core.xla_model").get_rng_state().to_bytes(8, "little")
        return {kind: torch.tensor(list(seed), dtype=torch.uint8)}
    return {} if kind == "cpu" else {kind: torch.get_device_module(kind).get_rng_state()}


def set_device_rng_state(states: dict[str, Tensor]) -> None:
    """Set the device's random numbers back to what `device_rng_state` returned; other types' states are ignored."""
    kind = device_type()
    if kind not in states or kind == "cpu":
        return
    if kind == "xla":
        torch_xla_module("core.xla_model").set_rng_state(int.from_bytes(bytes(states[kind].tolist()), "little"))
    else:
        torch.get_device_module(kind).set_rng_state(states[kind])


def step_boundary() -> None:
    """End of a training step: hands the graph recorded so far to the XLA compiler; elsewhere it does nothing.

    Raises:
        DeviceError: the compiler refused a graph or the device's memory did not suffice, for this step or one before.
    """
    if is_lazy_device():
        with device_errors():
            torch_xla_module().sync()


def has_torch_xla() -> bool:
    """Whether torch-xla is installed."""
    spec = importlib.util.find_spec("torch_xla")
    return spec is not None and spec.origin is not None  # a stand-in has no origin


def check_torch_xla(what: str) -> None:
    """Raise ModuleNotFoundError if torch-xla, which `what` needs, is not installed."""
    if not has_torch_xla():
        raise ModuleNotFoundError(
            f"{what} needs torch-xla, which is not installed: install torch_xla of the same version as torch"
        )


def torch_xla_module(name: str = "") -> Any:
    """torch-xla, or its module of this name, imported now: environment variables that it reads must be set before."""
    return importlib.import_module(f"torch_xla.{name}" if name else "torch_xla")


def _check_asked(asked: str) -> str:
    if asked not in DEVICE_TYPES:
        raise ValueError(f"unknown NXD_DEVICE={asked!r}; use one of {', '.join(sorted(DEVICE_TYPES))}")
    if asked == "xla" and not has_torch_xla():
        raise RuntimeError("NXD_DEVICE=xla needs torch-xla; install torch_xla of the same version as torch")
    if asked == "neuron":
        _load_torch_neuronx()
        if _accelerator() != asked:
            raise RuntimeError(
                "NXD_DEVICE=neuron needs the native torch-neuronx (2.13 or newer) and its device; install it, or set "
                "NXD_DEVICE=xla for torch-xla, or NXD_DEVICE=cpu"
            )
    if asked == "cuda" and _accelerator() != asked:
        raise RuntimeError("NXD_DEVICE=cuda, but torch sees no CUDA device; check the driver or use NXD_DEVICE=cpu")
    return asked


def _type_of(what: DeviceLike) -> str:
    if what is None:
        return device_type()
    if isinstance(what, Tensor):
        return what.device.type
    return what if isinstance(what, str) else what.type


def _compute_capability(what: DeviceLike) -> tuple[int, int]:
    if not torch.cuda.is_available():
        return (9, 0)  # fake tensors, to try out what a GPU would run
    return torch.cuda.get_device_capability(what.device if isinstance(what, Tensor) else what)


@functools.cache
def _log_once(message: str) -> None:
    _logger.warning("%s", message)


def _accelerator() -> str | None:
    """The type of torch's accelerator, if it has a device."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def _load_torch_neuronx() -> None:
    """Import torch-neuronx, which registers its device with torch, if it is installed and not imported yet."""
    if _accelerator() is None and importlib.util.find_spec("torch_neuronx") is not None:
        importlib.import_module("torch_neuronx")


@functools.cache
def _has_pinned_memory_and_events(kind: str) -> bool:
    try:
        torch.empty(1, device="cpu").pin_memory()
        event = torch.Event(kind)
        event.record()
        event.synchronize()
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


def send_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting for the copy; on the CPU, return the tensor itself.

    On XLA the copy is data and no part of the graph being recorded, so another thread may call this.
    """
    pinned = tensor.pin_memory() if has_streams(device) else tensor
    return pinned.to(device, non_blocking=True)


def read_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Request a tensor's values before the device has computed them, so that more work can be queued meanwhile.

    Args:
        tensor: a device tensor; on XLA, one of a step that has ended, see `step_boundary`.

    Returns:
        A function that waits for the values, but not for later work, and returns them on the CPU.
    """
    if not has_streams(tensor):
        return tensor.detach().cpu
    values = tensor.detach().to("cpu", non_blocking=True)  # queued on the device before any later work
    copied = torch.Event(tensor.device)
    copied.record(torch.accelerator.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return values

    return wait
