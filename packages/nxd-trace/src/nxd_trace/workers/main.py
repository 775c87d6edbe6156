"""The program of a worker process: receive a request, execute it, answer; end when the connection is closed."""

import errno
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from nxd_state import initialize_model_parallel, model_parallel_is_initialized

from nxd_trace.errors import MissingMainGuardError
from nxd_trace.workers.building import Builder, fill_weights
from nxd_trace.workers.messages import (
    CALL,
    DONE,
    Answer,
    Build,
    Compile,
    Export,
    Fill,
    ReadState,
    ReplaceWeights,
    ResetState,
    Serve,
    WriteState,
    receive,
    send_header,
    send_object,
)
from nxd_trace.workers.pickling import loads_in_worker
from nxd_trace.workers.serving import Server

_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def main(settings: Mapping[str, Any]) -> None:
    """The life of a worker.

    Args:
        settings: descriptors of connection, shared memory, the store that the ranks meet in and the file for stacks,
            where the main script is, and how many replicas of the model and parts of its experts the ranks are.
    """
    faulthandler.enable(os.fdopen(settings["stacks"], "wb", buffering=0))
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    connection = socket.socket(fileno=settings["connection"])
    worker = _Worker(connection, settings)
    try:
        worker.run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # gloo's threads must not outlive what they refer to, and nothing else is left to do


def _end_with_parent() -> None:
    """Standard input closes when the parent dies, also while this process waits in a collective or for a compiler."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)  # with the compiler


class _Worker:
    """First builds a model's shard, then serves it; or only serves."""

    def __init__(self, connection: socket.socket, settings: Mapping[str, Any]) -> None:
        self._connection = connection
        self._memory: int = settings["memory"]
        self._store: int = settings["store"]
        self._main_script: dict[str, str] = settings["main"]
        self._replicas: int = settings["replicas"]
        self._expert_parallel_size: int = settings["expert_parallel_size"]
        self._builder: Builder | None = None
        self._server: Server | None = None

    def run(self) -> None:
        """Until the parent closes the connection."""
        while True:
            try:
                kind, program, request = receive(self._connection)
            except (EOFError, ConnectionError):
                return
            try:
                if kind == CALL:
                    assert self._server is not None
                    self._server.call(program)
                    send_header(self._connection, DONE)
                else:
                    send_object(self._connection, Answer(self._handle(request)))
            except ConnectionError:
                return
            except BaseException as error:
                send_object(self._connection, _failure(error))

    def _handle(self, request: Any) -> Any:
        if not model_parallel_is_initialized():
            over_replicas = self._replicas % self._expert_parallel_size == 0
            initialize_model_parallel(
                tensor_model_parallel_size=int(os.environ["WORLD_SIZE"]) // self._replicas,
                expert_model_parallel_size=self._expert_parallel_size,
                expert_tensor_parallel_size=None if over_replicas else 1,
                store=dist.FileStore(f"/dev/fd/{self._store}"),
            )
        match request:
            case Build():
                self._builder = Builder(request, self._main_script)
            case Fill():
                fill_weights(request, self._main_script)
            case Serve():
                self._builder = None  # frees the model before its weights are loaded
                make_preprocessor = loads_in_worker(request.preprocessor, self._main_script)
                preprocessor = None if make_preprocessor is None else make_preprocessor()
                self._server = Server(request.folder, self._memory, preprocessor)
            case Export() | Compile():
                return self._build(request)
            case _:
                return self._serve(request)
        return None

    def _build(self, request: Export | Compile) -> Any:
        assert self._builder is not None
        return self._builder.export(request) if isinstance(request, Export) else self._builder.compile(request)

    def _serve(self, request: Any) -> Any:
        assert self._server is not None
        match request:
            case ReplaceWeights():
                return self._server.replace_weights(request.source, request.folder)
            case ResetState():
                return self._server.reset_state()
            case ReadState():
                return self._server.read_state(request.name)
            case WriteState():
                return self._server.write_state(request.name, request.value)
        raise TypeError(f"unknown request {request}")


def _failure(error: BaseException) -> Answer:
    """As text: the parent may not know the exception's class."""
    if isinstance(error, MissingMainGuardError):
        return Answer(error=str(error), lacks_main_guard=True)
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
        return Answer(error=str(error), storage_error=error)
    return Answer(error=f"{type(error).__name__}: {error}", traceback="".join(traceback.format_exception(error)))
