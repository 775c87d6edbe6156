"""Which device training would use here, and whether torch has its transport."""

from dataclasses import dataclass
from pathlib import Path

from nxd_trainer.doctor.finding import Finding, ok, warning, wrong


@dataclass(frozen=True)
class Devices:
    """What a host has.

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
