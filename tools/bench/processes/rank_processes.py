"""Processes, one per rank, that wait at a pipe, without using a core, until they are told what to do."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self


class RankProcesses:
    """The running processes; `with` ends them.

    Args:
        ranks: how many to start.
        serve: what each runs, a function of a module: `serve(*arguments, rank, store, connection)`, where `store` is
            the file in which the ranks meet. It answers each request that it receives, and ends with an EOFError there.
        arguments: for `serve`.
    """

    def __init__(self, ranks: int, serve: Callable[..., None], *arguments: object) -> None:
        self._folder = TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(ranks)]
        store = Path(self._folder.name) / "store"
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            spawn.Process(target=serve, args=(*arguments, rank, store, theirs), daemon=True)
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

    def request(self, message: object, doing: str) -> list[Any]:
        """What every rank answers to a message, by rank; `doing` says in an error what was asked for.

        Raises:
            RuntimeError: a rank failed; it has printed its traceback.
        """
        for connection in self._connections:
            connection.send(message)
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            # Whichever comes first: a rank that fails leaves the others waiting for it.
            ready = wait([it for rank, it in enumerate(self._connections) if rank not in answers])
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    answers[rank] = _receive(connection, doing)
        return [answers[rank] for rank in range(len(self._connections))]


def _receive(connection: Connection, doing: str) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError(f"a rank failed {doing}; see its traceback above") from None


def in_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield every name once in each round; each round starts with another one, so that none always follows the same."""
    for first in range(rounds):
        start = first % len(names)
        yield from (*names[start:], *names[:start])
