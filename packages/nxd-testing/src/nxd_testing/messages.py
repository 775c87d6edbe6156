"""Messages between the pool and a worker process over their connection.

A job goes like this: the pool sends a `Job`; the worker answers with a `Success` or a `Raised`; the pool sends
`RELEASE` once no rank needs this one any more; the worker tears its process groups down and answers with a
`TornDown`. Only plain data is defined here; how calls and results are pickled is in `serialization`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

READY = "ready"
RELEASE = "release"


@dataclass(frozen=True)
class Job:
    """One rank's share of a job, with the parent's state that it needs."""

    number: int
    rank: int
    world_size: int
    backend: str
    env: dict[str, str]
    working_directory: str
    import_path: list[str]
    call: bytes


@dataclass(frozen=True)
class Success:
    """The function returned."""

    result: bytes


@dataclass(frozen=True)
class Raised:
    """The function raised; `time` is `time.monotonic()`, which all processes of a machine share."""

    summary: str
    traceback: str
    time: float


@dataclass(frozen=True)
class TornDown:
    """The process groups are destroyed; `error` is the traceback if destroying them raised."""

    error: str | None


def send(connection: Connection, message: Any) -> None:
    """Sends a message by plain pickle: `Connection.send` would move torch's tensors through shared memory."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receives one message.

    Raises:
        EOFError: the other side is gone.
    """
    try:
        return pickle.loads(connection.recv_bytes())
    except ConnectionResetError as error:
        raise EOFError from error
