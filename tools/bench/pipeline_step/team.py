"""Two processes, one per pipeline rank, that wait at a pipe, without using a core, until they are told what to do."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from nxd_state import destroy_model_parallel, initialize_model_parallel

from pipeline_step.variants import RANKS

T = TypeVar("T")


class Team:
    """The running processes; `with` ends them."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(RANKS)]
        store = Path(self._folder.name) / "store"
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            spawn.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if kind is not None:  # it may be waiting for a rank that failed
                process.terminate()
            process.join()
        self._folder.cleanup()

    def call(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """`function(*arguments)` on every rank at once; results by rank.

        Raises:
            RuntimeError: a rank failed; it has printed its traceback.
        """
        for connection in self._connections:
            connection.send((function, arguments))
        answers: dict[int, T] = {}
        while len(answers) < len(self._connections):
            # Whichever comes first: a rank that fails leaves the others waiting for it.
            ready = wait([it for rank, it in enumerate(self._connections) if rank not in answers])
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    answers[rank] = self._receive(connection, function)
        return [answers[rank] for rank in range(len(self._connections))]

    @staticmethod
    def _receive(connection: Connection, function: Callable[..., T]) -> Any:
        try:
            return connection.recv()
        except EOFError:
            raise RuntimeError(f"a rank failed in {function.__name__}; see its traceback above") from None


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
