"""What is installed and what this machine has, without importing torch: versions, CPU cores, memory, accelerators."""

import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

OWN = "nxd-"  # prefix of these packages' names
OLDEST_TORCH, NEWEST_TORCH = (2, 9), (2, 15)  # as in `dependencies` of the packages


def own_packages() -> list[str]:
    """The installed nxd packages."""
    return sorted({it.name for it in metadata.distributions() if it.name and it.name.startswith(OWN)})


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the distributions among `names` that are installed."""
    found = {}
    for name in names:
        try:
            version: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = version or "(unknown version)"  # a broken installation left a folder without one
    return found


def version_numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (2, 9, 1) for "2.9.1+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def render_versions() -> str:
    """One line for each installed nxd package, torch and Python, for `--version`."""
    versions = installed_versions([*own_packages(), "torch"]) | {"python": platform.python_version()}
    return "\n".join(f"{name} {version}" for name, version in versions.items())


def torch_problem() -> str:
    """Why the packages cannot work with the installed torch, and what to do; empty if they can."""
    oldest, newest = (".".join(map(str, it)) for it in (OLDEST_TORCH, NEWEST_TORCH))
    version = installed_versions(["torch"]).get("torch", "")
    if version_numbers(version) and version_numbers(version) < OLDEST_TORCH:
        return f"torch {version} is too old; nxd needs torch {oldest} to {newest}: pip install 'torch>={oldest}'"
    return ""


def describe_devices() -> str:
    """The CPU cores, memory and accelerators of this machine, from the file system: "2 CPU cores, 15.4 GiB, no GPU"."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    accelerators = [text for text in (_nvidia_gpus(), _neuron_devices()) if text]
    found = [
        f"{cores} CPU core{'' if cores == 1 else 's'}",
        f"{memory:.1f} GiB of memory",
        *(accelerators or ["no NVIDIA GPU or Neuron device"]),
    ]
    return ", ".join(found)


def num_accelerators() -> int:
    """The number of NVIDIA GPUs, or else of Neuron devices."""
    return len(_device_files(r"nvidia\d+")) or len(_device_files(r"neuron\d+"))


def _device_files(pattern: str) -> list[Path]:
    return [it for it in Path("/dev").glob("n*") if re.fullmatch(pattern, it.name)]


def _nvidia_gpus() -> str:
    count = len(_device_files(r"nvidia\d+"))
    described = (_model_of_gpu(it) for it in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = sorted({name for name in described if name})
    return f"{count} x {' or '.join(names) or 'NVIDIA GPU'}" if count else ""


def _model_of_gpu(information: Path) -> str:
    try:
        found = re.search(r"^Model:\s*(.+)$", information.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def _neuron_devices() -> str:
    count = len(_device_files(r"neuron\d+"))
    return f"{count} Neuron device{'' if count == 1 else 's'}" if count else ""
