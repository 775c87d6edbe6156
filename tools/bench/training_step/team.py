"""Processes that compute variants together, each waiting at a pipe, without using its core, until it is told to.

The parent calls functions on all of a team's ranks. What they can be asked is in `rounds`, `operators` and `traffic`.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from nxd_state import destroy_model_parallel, initialize_model_parallel

from training_step.sizes import Size
from training_step.step import Trainee
from training_step.variants import Variant

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """How many tensor-parallel ranks compute which variants of one model, with how many threads each."""

    ranks: int
    threads: int
    size: Size
    variants: tuple[Variant, ...]


class Team:
    """The running processes of a layout; `with` ends them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._folder = TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(layout.ranks)]
        store = Path(self._folder.name) / "store"
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            spawn.Process(target=_serve, args=(layout, rank, store, theirs), daemon=True)
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

    def call(self, function: Callable[[Trainee], T], variant: Variant) -> list[T]:
        """`function` of one variant's trainee, on every rank at once; results by rank.

        Raises:
            RuntimeError: a rank failed; it has printed its traceback.
        """
        for connection in self._connections:
            connection.send((variant.name, function))
        answers: dict[int, T] = {}
        while len(answers) < len(self._connections):
            # Whichever comes first: a rank that fails leaves the others waiting for it.
            ready = wait([c for rank, c in enumerate(self._connections) if rank not in answers])
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    answers[rank] = self._receive(connection, variant)
        return [answers[rank] for rank in range(len(self._connections))]

    @staticmethod
    def _receive(connection: Connection, variant: Variant) -> Any:
        try:
            return connection.recv()
        except EOFError:
            raise RuntimeError(f"a rank failed at {variant.name!r}; see its traceback above") from None


def _serve(layout: Layout, rank: int, store: Path, connection: Connection) -> None:
    """Make all variants, then call what the parent sends until it hangs up."""
    torch.set_num_threads(layout.threads)
    if layout.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=layout.ranks)
    initialize_model_parallel(layout.ranks)
    trainees = {variant.name: Trainee(variant, layout.size) for variant in layout.variants}
    while True:
        try:
            name, function = connection.recv()
        except EOFError:
            break
        connection.send(function(trainees[name]))
    destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
