"""Which versions are installed, and whether they fit together."""

import importlib
import re
from collections.abc import Iterable, Mapping
from importlib import metadata

from nxd_trainer.doctor.finding import Finding, ok, warning, wrong

OWN = (
    "nxd-state",
    "nxd-layers",
    "nxd-pipeline",
    "nxd-optim",
    "nxd-ckpt",
    "nxd-trainer",
    "nxd-trace",
    "nxd-lightning",
)
OTHERS = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "transformers", "safetensors")
OLDEST_TORCH = (2, 9)
OLDEST_TRANSFORMERS = (5, 0)


def installed_versions(names: Iterable[str] = (*OWN, *OTHERS)) -> dict[str, str]:
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
    """Whether torch is there and new enough."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    if "torch" not in versions:
        return wrong("torch", "not installed", f"pip install 'torch>={oldest}'")
    if _numbers(versions["torch"]) < OLDEST_TORCH:
        return wrong(
            "torch", f"torch {versions['torch']}", f"these packages need {oldest} or newer: pip install -U torch"
        )
    return ok("torch", f"torch {versions['torch']}")


def torch_import_failure() -> str:
    """What importing torch raises; empty if it works."""
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
    own = {name: version for name, version in versions.items() if name in OWN}
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
