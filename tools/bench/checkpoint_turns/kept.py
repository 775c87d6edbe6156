"""The processor seconds of calls that look through a folder of kept checkpoints, whatever these hold."""

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nxd_ckpt
import torch
from nxd_ckpt.boxes import Box
from nxd_ckpt.manifest import Chunk, Manifest, TensorEntry, data_file_name
from nxd_ckpt.manifest_text import encode

NUM_TENSORS, WORLD_SIZE = 2000, 32


def measure_kept(folder: Path, number: int) -> list[str]:
    """A line for each call, in a folder of so many checkpoints of 2,000 tensors that are sharded over 32 ranks.

    The tensors are small, since only manifests matter.
    """
    _fill(folder, number)
    size = (folder / "step-1" / "manifest.json").stat().st_size
    calls: dict[str, Callable[[], object]] = {
        "latest": lambda: nxd_ckpt.latest(folder),
        "list_checkpoints": lambda: nxd_ckpt.list_checkpoints(folder),
        "save of one small tensor": lambda: nxd_ckpt.save(folder, "new", {"w": torch.ones(1)}, step=2 * number + 2),
        "retain that removes one": lambda: nxd_ckpt.retain(folder, keep_last=3, keep_every=2),
        "gc": lambda: nxd_ckpt.gc(folder),
    }
    lines = [f"{number} kept checkpoints with manifests of {size / 1e6:.1f} MB"]
    for name, call in calls.items():
        begun, wall = time.process_time(), time.monotonic()
        call()
        lines.append(f"{name:28} {time.process_time() - begun:8.3f} cpu s {time.monotonic() - wall:8.3f} s")
    return lines


def _fill(folder: Path, number: int) -> None:
    """As saves would leave it, but for the elements, all zero, and their hashes."""
    files = [data_file_name("0" * 32, rank) for rank in range(WORLD_SIZE)]
    tensors = {
        f"layers.{index}.weight": TensorEntry(
            "F32",
            (WORLD_SIZE, 2),
            tuple(Chunk(file, 8 * index, 8, Box((rank, 0), (1, 2)), ("0" * 16,)) for rank, file in enumerate(files)),
        )
        for index in range(NUM_TENSORS)
    }
    sizes = dict.fromkeys(files, 8 * NUM_TENSORS)
    manifest = Manifest("0" * 32, 0, 0.0, WORLD_SIZE, None, sizes, tensors, {}, None, {}, {})
    for copy in range(1, number + 1):
        target = folder / f"step-{copy}"
        (target / "data").mkdir(parents=True)
        for file, size in sizes.items():
            (target / file).touch()
            os.truncate(target / file, size)
        step = 3 if copy == 2 else 2 * copy  # one that keep_every=2 does not keep
        of_copy = replace(manifest, step=step, save_id=uuid.uuid4().hex, committed_at=float(copy))
        (target / "manifest.json").write_bytes(encode(of_copy))
