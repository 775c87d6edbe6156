"""What goes wrong on a device names who and when: memory that does not suffice, a rank that is killed or raises."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from nxd_state.device import get_device
from nxd_testing import RankFailure

from gpu_check.parts.training import SETTINGS, run_nxd
from gpu_check.ranks import on_ranks
from gpu_check.rows import Row

TOO_LARGE = ["train.global_batch_size=4096", "data.sequence_length=8192", "model.max_position_embeddings=8192"]


def rows(device: str) -> Iterator[Row]:
    """Rows of a step that does not fit, of a killed rank and of one that raises."""
    yield _out_of_memory() if device == "cuda" else Row("errors", "out of memory", "skipped", "needs a GPU")
    yield _failure(device, "a rank is killed", kill_rank_1, "rank 1")
    yield _failure(device, "a rank raises", raise_on_rank_1, "one of them")


def _out_of_memory() -> Row:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "text.txt").write_text("to be or not to be " * 2_000_000, encoding="utf8")
        try:
            run_nxd(Path(name), "train", *SETTINGS, *TOO_LARGE, "output=run")
        except RuntimeError as error:
            text = str(error)
            named = "out of memory" in text and "rank 0" in text and "in step 1" in text
            return Row("errors", "out of memory", "ok" if named else "wrong", text.strip().splitlines()[-1])
    return Row("errors", "out of memory", "wrong", "the run fitted; make it larger")


def kill_rank_1() -> None:
    """End rank 1 while the others wait for it in a sum."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1, device=get_device()))


def raise_on_rank_1() -> None:
    """Raise on rank 1 while the others wait for it in a sum."""
    if dist.get_rank() == 1:
        raise ValueError("one of them")
    dist.all_reduce(torch.ones(1, device=get_device()))


def _failure(device: str, case: str, job: Callable[[], None], named: str) -> Row:
    begun = time.monotonic()
    try:
        on_ranks(device, job, 2, timeout=60.0)
    except RankFailure as failure:
        detail = f"after {time.monotonic() - begun:.1f} s: {str(failure).splitlines()[0]}"
        return Row("errors", case, "ok" if named in str(failure) else "wrong", detail)
    return Row("errors", case, "wrong", "nobody noticed")
