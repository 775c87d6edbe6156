"""The peak of a step's memory beside what `nxd plan` predicts."""

from collections.abc import Iterator

import torch
from nxd_pipeline.runtime.memory import StepMemory
from nxd_plan import FixedDegrees, OwnLlama, TrainingJob, find_device, make_plan
from nxd_state.device import get_device

from gpu_check.llama import ours, size_for
from gpu_check.ranks import on_ranks
from gpu_check.rows import Row

TOLERANCE = 0.1


def rows(device: str) -> Iterator[Row]:
    """One row with float32 optimizer states sharded over one rank, and one without."""
    for zero1 in (False, True):
        (measured,) = on_ranks(device, peak_bytes, 1, zero1)
        predicted = _predicted(torch.device(device), zero1)
        ratio = predicted / measured
        detail = f"predicted {predicted / 2**20:,.0f} MiB, measured {measured / 2**20:,.0f} MiB, ratio {ratio:.3f}"
        case = "ZeRO-1" if zero1 else "AdamW in bfloat16"
        yield Row("memory", case, "ok" if abs(ratio - 1) <= TOLERANCE else "wrong", detail)


def peak_bytes(zero1: bool) -> int:
    """Bytes of tensors at the peak of the second step, as CUDA's allocator counts them, or torch's operations."""
    device = get_device()
    size = size_for(device)
    with StepMemory() as counted:
        model, optimizer = ours(size, device, zero1=zero1)
        for _ in range(2):
            counted.peak_bytes = counted.held_bytes
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            model.run_train(**size.tokens(device))
            optimizer.step()
            optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else counted.peak_bytes


def _predicted(device: torch.device, zero1: bool) -> int:
    size = size_for(device)
    job = TrainingJob(
        OwnLlama(size.config),
        find_device("cpu"),
        1,
        sequence_length=size.length,
        global_batch_size=size.batch,
        dtype=torch.bfloat16,
    )
    (planned,) = make_plan(job, FixedDegrees(1, 1, False, int(zero1), size.batch, "none")).best
    return planned.memories[0].peak
