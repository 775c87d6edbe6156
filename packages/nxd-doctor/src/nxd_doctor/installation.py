"""Checks that the installed packages fit together and find a device: versions, the import name, torch's backends.

A check is a function from observed values to a `Finding`; a separate function reads the values from the machine.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from nxd_cli.installation import NEWEST_TORCH, OLDEST_TORCH, OWN, version_numbers

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: name of the check.
        status: "wrong" prevents training; a "warning" may.
        found: the observed values.
        mend: how to fix it; empty if there is nothing to fix.
    """

    check: str
    status: Status
    found: str
    mend: str = ""


def ok(check: str, found: str) -> Finding:
    """A finding that needs no fix."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, mend: str) -> Finding:
    """A finding: training works, but not well or not everywhere."""
    return Finding(check, "warning", found, mend)


def wrong(check: str, found: str, mend: str) -> Finding:
    """A finding: training does not work."""
    return Finding(check, "wrong", found, mend)


OTHER_OWNER = "neuronx-distributed"  # also provides the import name neuronx_distributed
OTHERS = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "transformers", "safetensors")
OLDEST_TRANSFORMERS = (5, 0)


def check_torch(versions: Mapping[str, str]) -> Finding:
    """Whether torch is installed, and a release that the packages are tested with."""
    oldest, newest = (".".join(map(str, it)) for it in (OLDEST_TORCH, NEWEST_TORCH))
    if "torch" not in versions:
        return wrong("torch", "not installed", f"pip install 'torch>={oldest}'")
    if version_numbers(versions["torch"]) < OLDEST_TORCH:
        return wrong(
            "torch", f"torch {versions['torch']}", f"these packages need {oldest} or newer: pip install -U torch"
        )
    if version_numbers(versions["torch"])[:2] > NEWEST_TORCH:
        mend = f"these packages are tested with torch {oldest} to {newest}: pip install 'torch=={newest}.*'"
        return warning("torch", f"torch {versions['torch']}", mend)
    return ok("torch", f"torch {versions['torch']}")


def torch_import_failure() -> str:
    """The error that importing torch raises; empty if it works."""
    try:
        importlib.import_module("torch")
    except Exception as error:  # a missing system library is an OSError, a broken installation may raise any other
        return f"{type(error).__name__}: {error}"
    return ""


def check_torch_import(failure: str) -> Finding:
    """Whether the installed torch can be imported."""
    name = "import torch"
    if failure:
        mend = "install what the error names, or reinstall torch: pip install --force-reinstall torch"
        return wrong(name, f"fails with {failure}", mend)
    return ok(name, "works")


def check_own_packages(versions: Mapping[str, str]) -> Finding:
    """Whether the installed nxd packages have the same minor release."""
    own = {name: version for name, version in versions.items() if name.startswith(OWN)}
    lines = {version_numbers(version)[:2] for version in own.values()}
    listed = ", ".join(f"{name} {version}" for name, version in own.items())
    if not own:
        return ok("nxd packages", "imported from a source tree, not installed as distributions")
    if len(lines) > 1:
        return wrong("nxd packages", listed, f"use packages of the same release: pip install -U {' '.join(own)}")
    return ok("nxd packages", listed)


def check_xla(versions: Mapping[str, str]) -> Finding:
    """Whether torch-xla, if installed, matches this torch: its binary fits only one minor release."""
    name, torch_version = "torch-xla", versions.get("torch", "")
    if name not in versions:
        return ok(name, "not installed; needed only for XLA and Neuron devices")
    found = f"torch-xla {versions[name]} with torch {torch_version or 'missing'}"
    if version_numbers(versions[name])[:2] != version_numbers(torch_version)[:2]:
        minor = ".".join(map(str, version_numbers(versions[name])[:2]))
        return wrong(name, found, f"both must have the same minor release: pip install 'torch=={minor}.*'")
    return ok(name, found)


def check_neuron(versions: Mapping[str, str], *, has_device: bool) -> Finding:
    """Whether a host with Neuron devices has the packages that drive them, matching this torch."""
    name, index = "Neuron packages", "AWS's package index (the packages of that name on PyPI are placeholders)"
    parts = {part: versions[part] for part in ("torch-neuronx", "neuronx-cc", "libneuronxla") if part in versions}
    listed = ", ".join(f"{part} {version}" for part, version in parts.items())
    if not has_device:
        return ok(name, listed or "none installed, and no Neuron device")
    missing = [part for part in ("torch-neuronx", "neuronx-cc") if part not in parts]
    if missing:
        found = f"a Neuron device, but no {' and '.join(missing)}"
        return wrong(name, found, f"install {' '.join(missing)} from {index}")
    if version_numbers(parts["torch-neuronx"])[:2] != version_numbers(versions.get("torch", ""))[:2]:
        found = f"{listed}, with torch {versions.get('torch', 'missing')}"
        return wrong(name, found, f"install the torch-neuronx that matches your torch's minor release from {index}")
    return ok(name, listed)


def check_transformers(versions: Mapping[str, str]) -> Finding:
    """Whether transformers, if installed, is new enough for its models to be split into stages and shards."""
    name, oldest = "transformers", ".".join(map(str, OLDEST_TRANSFORMERS))
    if name not in versions:
        return ok(name, "not installed; needed only for Hugging Face models")
    if version_numbers(versions[name]) < OLDEST_TRANSFORMERS:
        return warning(
            name, f"transformers {versions[name]}", f"models are tested with {oldest} and newer: pip install -U {name}"
        )
    return ok(name, f"transformers {versions[name]}")


def import_location() -> Path | None:
    """The folder that `import neuronx_distributed` imports; None if there is none."""
    spec = importlib.util.find_spec("neuronx_distributed")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def own_location() -> Path | None:
    """The `neuronx_distributed` folder of nxd-neuronx; None if that is not installed."""
    spec = importlib.util.find_spec("nxd_neuronx")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1] / "neuronx_distributed"


def other_owner() -> str | None:
    """Name and version of the other distribution that provides the import name, if installed."""
    try:
        return f"{OTHER_OWNER} {metadata.version(OTHER_OWNER)}"
    except metadata.PackageNotFoundError:
        return None


def check_import_name(other: str | None, found: Path | None, own: Path | None) -> Finding:
    """Whether the import name resolves to nxd-neuronx and to nothing else.

    Args:
        other: name and version of the other distribution that provides it, if installed.
        found: the folder that is imported.
        own: the folder that should be; None if nxd-neuronx, which provides it, is not installed.
    """
    name = "import neuronx_distributed"
    if own is None:
        return ok(name, "nxd-neuronx is not installed")
    if other is not None:
        mend = (
            f"keep only one of them in an environment: pip uninstall {OTHER_OWNER} && pip install --force-reinstall "
            "--no-deps nxd-neuronx"
        )
        return wrong(name, f"{other} also provides this name; imported from {found}", mend)
    if found != own:
        mend = f"remove that folder from the import path, or put {own} first"
        return wrong(name, f"imported from {found}, not from nxd-neuronx", mend)
    return ok(name, "imports nxd-neuronx")


@dataclass(frozen=True)
class Devices:
    """The devices of a host.

    Attributes:
        chosen: the device type that nxd_state picks; empty if it cannot.
        problem: why it cannot.
        cuda: names of the visible CUDA devices.
        neuron: number of Neuron devices.
        backends: the backends of torch.distributed among "gloo", "nccl" and "xla" that are available.
    """

    chosen: str
    problem: str
    cuda: tuple[str, ...]
    neuron: int
    backends: tuple[str, ...]


def find_devices() -> Devices:
    """Ask torch and the file system."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from nxd_state import device_type  # noqa: PLC0415

    chosen, problem = "", ""
    try:
        chosen = device_type()
    except (ValueError, RuntimeError) as error:
        problem = str(error)
    backends = tuple(name for name in ("gloo", "nccl", "xla") if dist.is_backend_available(name))
    return Devices(
        chosen,
        problem,
        tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        len(list(Path("/dev").glob("neuron[0-9]*"))),
        backends,
    )


def check_devices(devices: Devices) -> Finding:
    """Whether there is a device to compute on, and a backend to communicate with."""
    name = "devices"
    if devices.problem:
        return wrong(name, devices.problem, "correct the environment variable, or unset it")
    found = f"uses {devices.chosen}; {len(devices.cuda)} CUDA, {devices.neuron} Neuron"
    if devices.cuda:
        found += f" ({', '.join(sorted(set(devices.cuda)))})"
    if "gloo" not in devices.backends:
        return wrong(name, f"{found}; torch without gloo", "install a torch built with distributed support")
    if devices.chosen == "cuda" and "nccl" not in devices.backends:
        return wrong(name, f"{found}; torch without nccl", "install torch's CUDA build, or set NXD_DEVICE=cpu")
    unused = [kind for kind, count in (("CUDA", len(devices.cuda)), ("Neuron", devices.neuron)) if count]
    if devices.chosen == "cpu" and unused:
        mend = "unset NXD_DEVICE and NXD_CPU_MODE, or install torch-xla and torch-neuronx for Neuron devices"
        return warning(name, f"{found}: {' and '.join(unused)} devices are not used", mend)
    return ok(name, f"{found}; backends {', '.join(devices.backends)}")


@dataclass(frozen=True)
class Kernels:
    """torch's kernels for a device.

    Attributes:
        device: the device's type.
        flash: whether flash attention runs.
        fused: whether memory-efficient and flex attention run.
        grouped: the dtypes of which it multiplies by all experts at once.
    """

    device: str
    flash: bool
    fused: bool
    grouped: tuple[str, ...]


def find_kernels() -> Kernels:
    """Ask torch."""
    import torch  # noqa: PLC0415
    from nxd_state import (  # noqa: PLC0415
        device_type,
        has_flash_attention,
        has_fused_attention,
        has_grouped_product,
        is_cpu,
    )

    kind = device_type()
    dtypes = [it for it in (torch.bfloat16, torch.float16, torch.float32) if has_grouped_product(it, kind)]
    names = tuple(str(it).removeprefix("torch.") for it in dtypes if hasattr(torch.nn.functional, "grouped_mm"))
    return Kernels(kind, is_cpu(kind) or has_flash_attention(kind), has_fused_attention(kind), names)


def check_kernels(kernels: Kernels) -> Finding:
    """Which kernels compute attention of cut sequences, and the products of experts."""
    attention = [name for name, there in (("flash", kernels.flash), ("memory-efficient, flex", kernels.fused)) if there]
    experts = f"grouped in {', '.join(kernels.grouped)}" if kernels.grouped else "one by one"
    found = (
        f"on {kernels.device}: attention of cut sequences by {', '.join(attention) or 'products of matrices'}; "
        f"products of experts {experts}"
    )
    return ok("kernels", found)
