"""Which device this process computes on, and the torch.distributed backend that goes with it.

The choice: `NXD_DEVICE` if set (`NXD_CPU_MODE=1` is the older spelling of `NXD_DEVICE=cpu`), else XLA when
`PJRT_DEVICE` or a Neuron device says so, else CUDA when visible, else CPU. torch-xla is imported only here.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from nxd_state.neuron_errors import device_errors

# On XLA torch.distributed carries what lies on the host; tensors of the device travel by torch-xla.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xla": "gloo"}


def device_type() -> str:
    """Type of this process's device: "cpu", "cuda" or "xla".

    Raises:
        ValueError: `NXD_DEVICE` names a type that is not known.
        RuntimeError: the environment asks for a device that is not available.
    """
    asked = "cpu" if os.environ.get("NXD_CPU_MODE") == "1" else os.environ.get("NXD_DEVICE", "")
    if asked:
        return _check_asked(asked)
    if "PJRT_DEVICE" in os.environ:
        if not _has_torch_xla():
            raise RuntimeError(
                f"PJRT_DEVICE={os.environ['PJRT_DEVICE']} asks for torch-xla, which is not installed; "
                "install torch_xla, or unset PJRT_DEVICE, or set NXD_DEVICE=cpu"
            )
        return "xla"
    if Path("/dev/neuron0").exists() and _has_torch_xla():
        return "xla"
    return "cuda" if torch.cuda.is_available() else "cpu"


def get_device() -> torch.device:
    """This process's device: `cuda:LOCAL_RANK`, the XLA device, or the CPU."""
    kind = device_type()
    if kind == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if kind == "xla":
        return torch.device(_torch_xla().device())
    return torch.device("cpu")


def records_graphs(what: Tensor | torch.device | str | None = None) -> bool:
    """Whether a device records operations into a graph, which it compiles and runs later, as XLA devices do.

    Consequences on such a device: all ranks have to record the same graph, so a rank may differ in data only;
    reading a value waits for the whole graph; backward only records, so that no hook can overlap it with messages;
    messages block; and tensors have no memory that views could share.

    Args:
        what: a tensor, a device or a device's type; this process's device if None.
    """
    if what is None:
        what = device_type()
    elif isinstance(what, Tensor):
        what = what.device
    return (what if isinstance(what, str) else what.type) == "xla"


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64; Neuron devices do not, and neither do Apple's."""
    return device.type in ("cpu", "cuda")


def step_boundary() -> None:
    """End of a training step: hands the graph recorded so far to the XLA compiler; elsewhere nothing happens.

    Raises:
        DeviceError: the compiler refused a graph or the device's memory did not suffice, for this step or one before.
    """
    if records_graphs():
        with device_errors():
            _torch_xla().sync()


def _check_asked(asked: str) -> str:
    if asked not in BACKENDS:
        raise ValueError(f"NXD_DEVICE={asked!r} is not known; use one of {', '.join(sorted(BACKENDS))}")
    if asked == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("NXD_DEVICE=cuda, but torch sees no CUDA device; check the driver or use NXD_DEVICE=cpu")
    if asked == "xla" and not _has_torch_xla():
        raise RuntimeError("NXD_DEVICE=xla needs torch-xla; install torch_xla of the same version as torch")
    return asked


def _has_torch_xla() -> bool:
    return importlib.util.find_spec("torch_xla") is not None


def _torch_xla() -> ModuleType:
    return importlib.import_module("torch_xla")
