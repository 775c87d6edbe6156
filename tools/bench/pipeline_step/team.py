"""Two processes, one per pipeline rank, that wait at a pipe, without using a core, until they are told what to do."""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from nxd_state import destroy_model_parallel, initialize_model_parallel
from processes.rank_processes import RankProcesses

from pipeline_step.variants import RANKS

T = TypeVar("T")


class Team(RankProcesses):
    """The running processes; `with` ends them."""

    def __init__(self) -> None:
        super().__init__(RANKS, _serve)

    def call(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """`function(*arguments)` on every rank at once; results by rank.

        Raises:
            RuntimeError: a rank failed; it has printed its traceback.
        """
        return self.request((function, arguments), f"in {function.__name__}")


def _serve(rank: int, store: Path, connection: Connection) -> None:
    os.environ["KINETO_LOG_LEVEL"] = "99"  # it has much to say on each profile
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            break
        connection.send(function(*arguments))
    destroy_model_parallel()
    dist.destroy_process_group()
