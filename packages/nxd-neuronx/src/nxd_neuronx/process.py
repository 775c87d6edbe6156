"""Questions that scripts ask of their process: device, hardware, random streams, ranks of the host, end of a step."""

import os
import random
from contextlib import AbstractContextManager
from enum import Enum, IntEnum

import numpy as np
import torch
import torch.distributed as dist
from nxd_state import (
    get_rng_state,
    get_world_group,
    initialize_model_parallel,
    is_cpu,
    is_lazy_device,
    model_parallel_is_initialized,
    rng_stream,
    seed_model_parallel,
    set_rng_state,
    step_boundary,
)
from torch import Tensor


class RngTracker:
    """Access to the random streams of nxd_state, which `model_parallel_xla_manual_seed` seeds."""

    def fork(self) -> AbstractContextManager[None]:
        """Draw from this tensor-parallel rank's own stream inside the `with` block.

        Raises:
            RuntimeError: the streams are not seeded.
        """
        return rng_stream("tp")

    def get_states(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of every stream."""
        return get_rng_state()

    def set_states(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Restore states of `get_states`."""
        set_rng_state(states)


_TRACKER = RngTracker()


def get_xla_rng_tracker() -> RngTracker:
    """Return the tracker of this process, on any device."""
    return _TRACKER


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch, and with an initialized mesh this rank's streams of nxd_state."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if model_parallel_is_initialized():
        seed_model_parallel(seed)


def get_local_world_size() -> int:
    """Return the number of ranks on this host: `LOCAL_WORLD_SIZE`, or all ranks without it."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return get_world_group().size if model_parallel_is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def initialize_fallback_parallel_state(device: torch.device | None = None) -> None:
    """Create a mesh of one rank if there is none. The layers here work without it."""
    if not model_parallel_is_initialized():
        initialize_model_parallel()


def is_pjrt_device() -> bool:
    """Return whether this process computes through PJRT, the runtime interface of XLA devices."""
    return is_lazy_device()


def cpu_mode() -> bool:
    """Return whether this process computes on the CPU."""
    return is_cpu()


def mark_step() -> None:
    """End the recorded graph on devices that record one; do nothing elsewhere."""
    if is_lazy_device():
        step_boundary()


def master_print(msg: object) -> None:
    """Print on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(msg, flush=True)


_TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
_LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"


class hardware(Enum):  # noqa: N801  (the documented name)
    """Generations of Neuron devices; `hardware("inf2")` is that of an instance type."""

    TRN1 = "trn1"
    TRN2 = "trn2"
    TRN3 = "trn3"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value: object) -> "hardware | None":
        if value in ("trn1n", "inf2"):
            return cls.TRN1
        return cls.CUSTOM if value is not None and value == os.environ.get(_TARGET_VARIABLE) else None


class LogicalNCConfig(IntEnum):
    """Number of physical NeuronCores in one logical core."""

    LNC_1 = 1
    LNC_2 = 2


def get_platform_target() -> str:
    """Return the generation in `NEURON_PLATFORM_TARGET_OVERRIDE`; "trn1" without it."""
    return os.environ.get(_TARGET_VARIABLE) or hardware.TRN1.value


def get_platform_lnc() -> LogicalNCConfig:
    """Return `NEURON_LOGICAL_NC_CONFIG`; without it, 2 if the platform target is trn2 or trn3, else 1.

    Raises:
        ValueError: the variable is neither 1 nor 2.
    """
    said = os.environ.get(_LNC_VARIABLE)
    if said is None or said == "-1":
        return LogicalNCConfig(2 if os.environ.get(_TARGET_VARIABLE) in ("trn2", "trn3") else 1)
    if said not in ("1", "2"):
        raise ValueError(f"{_LNC_VARIABLE}={said!r} is not a logical core size; set it to 1 or 2")
    return LogicalNCConfig(int(said))
