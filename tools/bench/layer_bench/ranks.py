"""A function on new processes, one per tensor-parallel rank."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import torch.distributed as dist
from nxd_state import destroy_model_parallel, initialize_model_parallel

T = TypeVar("T")


def on_ranks(tensor_parallel: int, function: Callable[..., T], *arguments: object) -> list[T]:
    """What `function(*arguments)` returns on each rank, in order; each rank has one thread."""
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, ProcessPoolExecutor(tensor_parallel, mp_context=spawn) as pool:
        # Each call waits for the others at the store, so that each gets a process of its own.
        store = str(Path(folder) / "store")
        calls = [
            pool.submit(_on_rank, rank, tensor_parallel, store, function, arguments) for rank in range(tensor_parallel)
        ]
        return [call.result() for call in calls]


def _on_rank(
    rank: int, tensor_parallel: int, store: str, function: Callable[..., T], arguments: tuple[object, ...]
) -> T:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tensor_parallel)
    initialize_model_parallel(tensor_parallel)
    try:
        return function(*arguments)
    finally:
        destroy_model_parallel()
        dist.destroy_process_group()
