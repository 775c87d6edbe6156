"""What scripts ask of the host and the device."""

import os

from nxd_state import device_type, get_world_group, model_parallel_is_initialized


def get_local_world_size() -> int:
    """Ranks on this host: what the launcher says, else all of them."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return get_world_group().size if model_parallel_is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_pjrt_device() -> bool:
    """Whether this process computes through PJRT, the runtime interface of XLA devices."""
    return device_type() == "xla"


def cpu_mode() -> bool:
    """Whether this process computes on the CPU."""
    return device_type() == "cpu"
