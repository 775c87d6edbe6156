"""Runs a function on ranks that are processes of this machine, and records what they compute."""

import importlib.machinery
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

SECONDS_TO_END = 30.0  # beyond the timeout, for ranks to print where they are


@dataclass(frozen=True)
class Job:
    """What all runs of a comparison have in common.

    Attributes:
        steps: how many steps are recorded; None is all.
        dtype: the default dtype.
        timeout: seconds that a run may take.
    """

    steps: int | None
    dtype: torch.dtype
    timeout: float


def run_ranks(
    function: Callable[..., object],
    given: Mapping[str, Any],
    world_size: int,
    recording: Path,
    job: Job,
    *,
    noise: int | None = None,
) -> None:
    """Call a function on each rank and record it. One rank has no process group.

    Args:
        function: called with `given`.
        given: keyword arguments.
        world_size: number of ranks.
        recording: the folder to record to.
        job: how to run.
        noise: see `record`.

    Raises:
        RuntimeError: a rank fails, or the ranks take too long.
        ImportError: cloudpickle is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="nxd-parity-") as own:
        folder = Path(own)
        options = {
            "world_size": world_size,
            "recording": recording,
            "steps": job.steps,
            "noise": noise,
            "dtype": job.dtype,
            "timeout": job.timeout,
        }
        (folder / "function").write_bytes(_pickled((function, dict(given), options)))
        processes = [_start(folder, rank, world_size) for rank in range(world_size)]
        try:
            problem = _wait(processes, job.timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if problem:
            outputs = [(folder / f"output-{rank}").read_text(errors="replace").strip() for rank in range(world_size)]
            texts = [f"rank {rank} printed:\n{text}" for rank, text in enumerate(outputs) if text]
            raise RuntimeError("\n\n".join([f"{recording.name}: {problem}", *texts]))


def _start(folder: Path, rank: int, world_size: int) -> subprocess.Popen[bytes]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    variables = {name: str(value) for name, value in ranks.items()} if world_size > 1 else {}
    others = {name: value for name, value in os.environ.items() if name not in ranks}
    with (folder / f"output-{rank}").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "nxd_parity.rank_process", str(folder), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=others | variables | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> str:
    """Wait until all ranks have ended, or one has failed, which others would wait for; returns what is wrong."""
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for rank, process in enumerate(processes):
        threading.Thread(target=lambda rank=rank, it=process: ended.put((rank, it.wait())), daemon=True).start()
    for _ in processes:
        try:
            rank, exit_code = ended.get(timeout=timeout + SECONDS_TO_END)
        except queue.Empty:
            return f"the ranks did not end within {timeout:g} seconds"
        if exit_code != 0:
            return f"rank {rank} ended with exit code {exit_code}"
    return ""


def _pickled(value: tuple[Callable[..., object], Any, Any]) -> bytes:
    """Pickle a function; functions and classes of modules that ranks cannot import by name go as code."""
    try:
        import cloudpickle  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "assert_same_training sends functions to ranks by cloudpickle: pip install 'nxd-parity[testing]'"
        ) from error
    function = value[0].func if isinstance(value[0], partial) else value[0]
    module = sys.modules.get(getattr(function, "__module__", ""))
    by_value = module is not None and module.__name__ != "__main__" and not _is_importable(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps(value)
        return data
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: Any) -> bool:
    """Whether another process with this path gets the same module by its name; not so for most tests."""
    name, _, _ = module.__name__.partition(".")
    spec = importlib.machinery.PathFinder.find_spec(name, sys.path)
    top = sys.modules.get(name)
    return spec is not None and top is not None and spec.origin == getattr(top, "__file__", None)
