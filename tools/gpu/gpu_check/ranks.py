"""Functions on ranks of their own: one a GPU over NCCL where there are enough, else all on one GPU."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from nxd_state.device import set_current_device
from nxd_testing import run_on_ranks

from gpu_check.staged import NAME, register_staged_groups

T = TypeVar("T")


def transport_of(device: str, num_ranks: int) -> str:
    """The backend by which that many ranks of a device meet here."""
    if device == "cpu":
        return "gloo"
    return "nccl" if torch.cuda.device_count() >= num_ranks else NAME


def on_ranks(device: str, fn: Callable[..., T], num_ranks: int, *args: Any, timeout: float = 120.0) -> list[T]:
    """Call `fn(*args)` on ranks whose tensors are on `device`; results come by rank, tensors as those of the CPU.

    Raises:
        RankFailure: a rank raised, died or took too long.
    """
    backend = transport_of(device, num_ranks)
    return run_on_ranks(in_group, num_ranks, backend, fn, args, timeout=timeout, env={"NXD_DEVICE": device})


def in_group(backend: str, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    """On a rank: exchange the pool's process group of the CPU by one of this backend, and call the function."""
    if backend != "gloo":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        set_current_device()
        dist.barrier()  # a rank must not close connections that others are still opening
        dist.destroy_process_group()  # the CPU's, which the pool created
        if backend == NAME:
            register_staged_groups(["cpu", "cuda"])
        dist.init_process_group(backend)
    return fn(*args)
