"""Checkpoints of tensors on the device: bit for bit, how fast, and how much a save in the background slows a step."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nxd_ckpt
import torch
from torch import Tensor

from gpu_check.rows import Row, check

GIGABYTES = {"cuda": 4.0, "cpu": 0.1}
TENSORS, STEPS = 32, 20


def rows(device: str) -> Iterator[Row]:
    """Rows of a save, a load, and steps beside a save in the background."""
    elements = int(GIGABYTES[device] * 2**30 / 2 / TENSORS)
    state = {f"weight{i}": torch.randn(elements, device=device, dtype=torch.bfloat16) for i in range(TENSORS)}
    expected = {name: it.clone() for name, it in state.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = _timed(lambda: nxd_ckpt.save(folder, "one", state), device)
        yield Row("checkpoints", "save", "measured", f"{GIGABYTES[device] / seconds:.2f} GiB/s")
        for it in state.values():
            it.zero_()
        seconds = _timed(lambda: nxd_ckpt.load(folder, "one", into=state), device)
        yield Row("checkpoints", "load", "measured", f"{GIGABYTES[device] / seconds:.2f} GiB/s")
        yield check(
            "checkpoints", "loaded is saved", sum(not torch.equal(state[n], it) for n, it in expected.items()), 0
        )
        yield from _background(folder, state, device)


def _background(folder: Path, state: dict[str, Tensor], device: str) -> Iterator[Row]:
    size = 4096 if device == "cuda" else 512
    left = torch.randn(size, size, device=device)

    def steps() -> None:
        for _ in range(STEPS):
            torch.mm(left, left)
        for it in state.values():  # what a step changes after the call returned is not in the checkpoint
            it.add_(1)

    alone = min(_timed(steps, device) for _ in range(3))
    expected = {name: it.clone() for name, it in state.items()}
    blocked = time.perf_counter()
    saving = nxd_ckpt.async_save(folder, "two", state)
    blocked = time.perf_counter() - blocked
    beside = _timed(steps, device)
    saving.wait()
    loaded = {name: torch.empty_like(it) for name, it in state.items()}
    nxd_ckpt.load(folder, "two", into=loaded)
    yield Row("checkpoints", "background save blocks", "measured", f"{blocked * 1e3:.0f} ms")
    yield Row("checkpoints", f"{STEPS} steps beside it", "measured", f"{beside / alone:.2f} of their time alone")
    different = sum(not torch.equal(loaded[name], it) for name, it in expected.items())
    yield check("checkpoints", "background save is of its moment", different, 0)


def _timed(run: Callable[[], object], device: str) -> float:
    """Seconds until the device has done what was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
