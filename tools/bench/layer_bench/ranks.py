"""A function on new processes, one for each tensor- and context-parallel rank."""

import math
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


def on_ranks(
    tensor_parallel: int, function: Callable[..., T], *arguments: object, context_parallel: int = 1
) -> list[T]:
    """What `function(*arguments)` returns on each rank, in order; each rank has one thread."""
    spawn = multiprocessing.get_context("spawn")
    world, sizes = tensor_parallel * context_parallel, (tensor_parallel, context_parallel)
    with TemporaryDirectory() as folder, ProcessPoolExecutor(world, mp_context=spawn) as pool:
        # Each call waits for the others at the store, so that each gets a process of its own.
        store = str(Path(folder) / "store")
        calls = [pool.submit(_on_rank, rank, sizes, store, function, arguments) for rank in range(world)]
        return [call.result() for call in calls]


def _on_rank(
    rank: int, sizes: tuple[int, int], store: str, function: Callable[..., T], arguments: tuple[object, ...]
) -> T:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=math.prod(sizes))
    tensor_parallel, context_parallel = sizes
    initialize_model_parallel(tensor_parallel, context_parallel_size=context_parallel)
    try:
        return function(*arguments)
    finally:
        destroy_model_parallel()
        dist.destroy_process_group()
