"""Messages between the pool and a worker process, and the pickling of calls and results.

The pool sends a `Job`; the worker answers with a `Success` or a `Raised`; the pool sends `RELEASE` once no rank needs
this one any more; the worker destroys its process groups and answers with a `TornDown`.

A call may name functions and classes of modules that only the parent process can import (a test module loaded by
pytest, a script, a notebook): these are pickled by value, all others by reference. Tensors in results become plain CPU
tensors.
"""

from __future__ import annotations

import functools
import importlib.machinery
import io
import pickle
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

READY = "ready"
RELEASE = "release"


@dataclass(frozen=True)
class Job:
    """One rank's part of a job, with the state of the parent process that it needs."""

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
    """Send a message by plain pickle; `Connection.send` would move tensors through shared memory."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receive one message.

    Raises:
        EOFError: the other side is gone.
    """
    try:
        return pickle.loads(connection.recv_bytes())
    except ConnectionResetError as error:
        raise EOFError from error


_LEFT_OUT = "<dynamic-code>"


def dumps_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a call so that any process with the same `sys.path` can load it."""
    buffer = io.BytesIO()
    pickler = _CallPickler(buffer)
    try:
        pickler.dump((fn, args))
    finally:
        for module in pickler.modules_by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


def dumps_result(result: Any) -> bytes:
    """Pickle a rank's result; every tensor becomes a detached, contiguous copy on the CPU."""
    buffer = io.BytesIO()
    _ResultPickler(buffer).dump(result)
    return buffer.getvalue()


class _CallPickler(cloudpickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules_by_value: list[ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):  # keep the file name for tracebacks; cloudpickle drops it since 3.1.3
            make, values = self.dispatch_table[CodeType](obj)
            return make, tuple(obj.co_filename if value == _LEFT_OUT else value for value in values)
        if isinstance(obj, FunctionType | type):
            module = sys.modules.get(obj.__module__)
            if (
                module is not None
                and module not in self.modules_by_value
                and not _workers_can_import(module.__name__, getattr(module, "__file__", None))
            ):
                cloudpickle.register_pickle_by_value(module)
                self.modules_by_value.append(module)
        return super().reducer_override(obj)


class _ResultPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and not obj.is_meta:
            plain = obj.detach().cpu().clone(memory_format=torch.contiguous_format)
            return plain.__reduce_ex__(2)
        return super().reducer_override(obj)


@functools.cache
def _workers_can_import(module_name: str, file: str | None) -> bool:
    """Whether an import by name, along `sys.path` alone, finds this file.

    `importlib.util.find_spec` is not enough: it trusts `sys.modules`, where pytest puts modules under names that no
    other process can import.
    """
    if file is None:  # built in, or a namespace
        return module_name != "__main__"
    if module_name.partition(".")[0] in sys.stdlib_module_names and file.startswith(sysconfig.get_path("stdlib")):
        return True  # collections.abc is a file of another name from Python 3.13 on
    search_path: list[str] | None = None
    parts = module_name.split(".")
    for end in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:end]), search_path)
        if spec is None:
            return False
        if spec.submodule_search_locations is not None:
            search_path = list(spec.submodule_search_locations)
    return spec is not None and spec.origin is not None and Path(spec.origin) == Path(file)
