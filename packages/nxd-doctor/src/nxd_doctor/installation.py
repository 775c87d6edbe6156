"""Checks that the installed packages fit together and find a device: versions, the import name, torch's transports.

A check is a function from what was found to a `Finding`; reading the machine is a function beside it.
"""

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: what was looked at.
        status: "wrong" keeps training from working; a "warning" may.
        found: what there is.
        mend: what to do about it; empty if nothing is to be done.
    """

    check: str
    status: Status
    found: str
    mend: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, mend: str) -> Finding:
    """Training works, but not well, or not everywhere."""
    return Finding(check, "warning", found, mend)


def wrong(check: str, found: str, mend: str) -> Finding:
    """Training does not work."""
    return Finding(check, "wrong", found, mend)


OWN = "nxd-"  # what the names of these packages begin with
OTHER_OWNER = "neuronx-distributed"  # of the import name neuronx_distributed
OTHERS = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "transformers", "safetensors")
OLDEST_TORCH = (2, 9)
OLDEST_TRANSFORMERS = (5, 0)


def own_packages() -> list[str]:
    """The nxd packages that are installed."""
    return sorted({it.name for it in metadata.distributions() if it.name.startswith(OWN)})


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            version: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = version or "of no known version"  # None of a folder that half an installation has left
    return found


def check_torch(versions: Mapping[str, str]) -> Finding:
    """Whether torch is installed and new enough."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    if "torch" not in versions:
        return wrong("torch", "not installed", f"pip install 'torch>={oldest}'")
    if _numbers(versions["torch"]) < OLDEST_TORCH:
        return wrong(
            "torch", f"torch {versions['torch']}", f"these packages need {oldest} or newer: pip install -U torch"
        )
    return ok("torch", f"torch {versions['torch']}")


def torch_import_failure() -> str:
    """The error that importing torch raises; empty if it works."""
    try:
        importlib.import_module("torch")
    except Exception as error:  # a missing library of the system is an OSError, half an installation any other
        return f"{type(error).__name__}: {error}"
    return ""


def check_torch_import(failure: str) -> Finding:
    """Whether what is installed as torch can be imported."""
    name = "import torch"
    if failure:
        mend = "install what the error names, or torch anew: pip install --force-reinstall torch"
        return wrong(name, f"fails with {failure}", mend)
    return ok(name, "works")


def check_own_packages(versions: Mapping[str, str]) -> Finding:
    """Whether the installed nxd packages are of one release line."""
    own = {name: version for name, version in versions.items() if name.startswith(OWN)}
    lines = {_numbers(version)[:2] for version in own.values()}
    listed = ", ".join(f"{name} {version}" for name, version in own.items())
    if not own:
        return ok("nxd packages", "not installed as distributions: they are imported from a source tree")
    if len(lines) > 1:
        return wrong("nxd packages", listed, f"use packages of one release: pip install -U {' '.join(own)}")
    return ok("nxd packages", listed)


def check_xla(versions: Mapping[str, str]) -> Finding:
    """Whether torch-xla, if there, is the one made for this torch: its binary fits one minor release only."""
    name, torch_version = "torch-xla", versions.get("torch", "")
    if name not in versions:
        return ok(name, "not installed; needed for XLA and Neuron devices only")
    found = f"torch-xla {versions[name]} with torch {torch_version or 'missing'}"
    if _numbers(versions[name])[:2] != _numbers(torch_version)[:2]:
        minor = ".".join(map(str, _numbers(versions[name])[:2]))
        return wrong(name, found, f"both must be of one minor release: pip install 'torch=={minor}.*'")
    return ok(name, found)


def check_neuron(versions: Mapping[str, str], *, has_device: bool) -> Finding:
    """Whether a host with Neuron devices has what drives them, for this torch.

    Args:
        versions: installed ones.
        has_device: whether the host has a Neuron device.
    """
    name, index = "Neuron packages", "AWS's own package index (those of that name on PyPI are placeholders)"
    parts = {part: versions[part] for part in ("torch-neuronx", "neuronx-cc", "libneuronxla") if part in versions}
    listed = ", ".join(f"{part} {version}" for part, version in parts.items())
    if not has_device:
        return ok(name, listed or "none, and no Neuron device either")
    missing = [part for part in ("torch-neuronx", "neuronx-cc") if part not in parts]
    if missing:
        found = f"a Neuron device, without {' and '.join(missing)}"
        return wrong(name, found, f"install {' '.join(missing)} from {index}")
    if _numbers(parts["torch-neuronx"])[:2] != _numbers(versions.get("torch", ""))[:2]:
        found = f"{listed}, with torch {versions.get('torch', 'missing')}"
        return wrong(name, found, f"install the torch-neuronx of your torch's minor release from {index}")
    return ok(name, listed)


def check_transformers(versions: Mapping[str, str]) -> Finding:
    """Whether transformers, if there, is new enough for its models to be cut into stages and shards."""
    name, oldest = "transformers", ".".join(map(str, OLDEST_TRANSFORMERS))
    if name not in versions:
        return ok(name, "not installed; needed for Hugging Face models only")
    if _numbers(versions[name]) < OLDEST_TRANSFORMERS:
        return warning(
            name, f"transformers {versions[name]}", f"models are tried with {oldest} and newer: pip install -U {name}"
        )
    return ok(name, f"transformers {versions[name]}")


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (2, 9, 1) of "2.9.1+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def import_location() -> Path | None:
    """The folder that `import neuronx_distributed` takes; None if there is none."""
    spec = importlib.util.find_spec("neuronx_distributed")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def own_location() -> Path | None:
    """The folder of that name in nxd-neuronx; None if that is not installed."""
    spec = importlib.util.find_spec("nxd_neuronx")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1] / "neuronx_distributed"


def other_owner() -> str | None:
    """Name and version of the other distribution that owns the name, if it is installed."""
    try:
        return f"{OTHER_OWNER} {metadata.version(OTHER_OWNER)}"
    except metadata.PackageNotFoundError:
        return None


def check_import_name(other: str | None, found: Path | None, own: Path | None) -> Finding:
    """Whether the import name leads to this package, and to no other.

    Args:
        other: name and version of the other distribution that owns it, if it is installed.
        found: what is imported.
        own: what should be; None if nxd-neuronx, which has it, is not installed.
    """
    name = "import neuronx_distributed"
    if own is None:
        return ok(name, "nxd-neuronx is not installed")
    if other is not None:
        mend = (
            f"keep one of them in an environment: pip uninstall {OTHER_OWNER} && pip install --force-reinstall "
            "--no-deps nxd-neuronx"
        )
        return wrong(name, f"{other} owns this name, too; imported from {found}", mend)
    if found != own:
        mend = f"take what lies there off the import path, or run where {own} comes first"
        return wrong(name, f"imported from {found}, not from nxd-neuronx", mend)
    return ok(name, "is nxd-neuronx's")


@dataclass(frozen=True)
class Devices:
    """The devices of a host.

    Attributes:
        chosen: the type that nxd_state picks; empty if it cannot.
        problem: why it cannot.
        cuda: names of the visible CUDA devices.
        neuron: number of Neuron devices.
        backends: of torch.distributed: those of "gloo", "nccl" and "xla" that are there.
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
        return wrong(name, devices.problem, "mend what the environment asks for, or unset it")
    found = f"computes on {devices.chosen}; {len(devices.cuda)} CUDA, {devices.neuron} Neuron"
    if devices.cuda:
        found += f" ({', '.join(sorted(set(devices.cuda)))})"
    if "gloo" not in devices.backends:
        return wrong(name, f"{found}; torch without gloo", "install a torch that was built with distributed support")
    if devices.chosen == "cuda" and "nccl" not in devices.backends:
        return wrong(name, f"{found}; torch without nccl", "install torch's CUDA build, or set NXD_DEVICE=cpu")
    unused = [kind for kind, count in (("CUDA", len(devices.cuda)), ("Neuron", devices.neuron)) if count]
    if devices.chosen == "cpu" and unused:
        mend = "unset NXD_DEVICE and NXD_CPU_MODE, or install torch-xla and torch-neuronx for Neuron devices"
        return warning(name, f"{found}: {' and '.join(unused)} devices are left idle", mend)
    return ok(name, f"{found}; backends {', '.join(devices.backends)}")
