"""Sending a user's function to the workers by pickle, with clear errors where that fails.

A function is pickled as its module and name, so workers import the module. If that is the main script, they import it
under the name `__mp_main__`, as multiprocessing does, but only when the function needs it. What cannot be imported (a
function within a function, a class of a notebook) is sent by value, where cloudpickle is installed.
"""

import importlib
import importlib.util
import io
import os
import pickle
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from nxd_trace.errors import MissingMainGuardError

_MAIN_IN_WORKER = "__mp_main__"

_is_importing_main = False
_preparation: dict[str, str] = {}  # of the workers of this process, if any


def prepare_workers(function: Callable[[], object]) -> None:
    """Have each worker call a function before it imports what it is sent, such as one that puts modules in place.

    Args:
        function: at the top level of a module that is not the main script. The last one given counts.
    """
    _preparation["prepare"] = f"{function.__module__}:{function.__qualname__}"


def main_script() -> dict[str, str]:
    """Where the main module came from, for workers that need a function defined in it, and what they call first."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    where = {"name": name} if name else {"path": os.path.abspath(path)} if path else {}
    return {**where, **_preparation}


def dumps_for_workers(value: Any, what: str) -> bytes:
    """Pickle `value`, by value where workers could not import it and cloudpickle is installed.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        data = pickle.dumps(value)
    except Exception as error:  # an object's own __reduce__ may raise anything
        reason = str(error)
    else:
        if b"__main__" not in data or _main_can_be_imported():
            return data
        reason = "it is defined in an interactive session, which worker processes cannot import"
    refused = f"{what} cannot be sent to the worker processes: "
    if importlib.util.find_spec("cloudpickle") is None:
        raise TypeError(
            f"{refused}{reason}. Define functions and classes at the top level of a file (no lambda, no function "
            "within a function), pass arguments with functools.partial, and open files or models inside the function. "
            "If cloudpickle is installed, they may be defined anywhere"
        )
    import cloudpickle  # noqa: PLC0415 - optional

    try:
        by_value: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(f"{refused}{error}. Open files and models inside the function") from error
    return by_value


def loads_in_worker(data: bytes, main: Mapping[str, str]) -> Any:
    """What `dumps_for_workers` pickled. `main` is the parent's `main_script`.

    Raises:
        MissingMainGuardError: importing the main script started another trace.
        TypeError: a module or name cannot be imported here.
    """
    try:
        if "prepare" in main:
            _prepare(main["prepare"])
        return _Unpickler(io.BytesIO(data), main).load()
    except (ImportError, AttributeError) as error:
        raise TypeError(
            f"a worker process cannot import what it was sent: {error}. Workers import by module and name along the "
            "sys.path of the process that started them; put func into a module on that path"
        ) from error


def check_not_in_worker() -> None:
    """Called where processes are about to be started.

    Raises:
        MissingMainGuardError: this process is a worker that is importing the main script.
    """
    if _is_importing_main:
        raise MissingMainGuardError(
            "the script starts a trace while a worker process imports it to find func; put the script's main code "
            "under\n"
            '    if __name__ == "__main__":\n'
            "so that importing it only defines its functions"
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, main: Mapping[str, str]) -> None:
        super().__init__(file)
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            _import_main(*next(iter(self._main.items())))
        return super().find_class(module, name)


def _main_can_be_imported() -> bool:
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or hasattr(main, "__file__")


@cache
def _prepare(function: str) -> None:
    """Once per process."""
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)()


@cache
def _import_main(kind: str, where: str) -> None:
    """Once per process. `kind` is "name" for what was started with `python -m`, "path" for a script."""
    with _importing_main():
        if kind == "name":
            names = runpy.run_module(where, run_name=_MAIN_IN_WORKER, alter_sys=True)
        else:
            names = runpy.run_path(where, run_name=_MAIN_IN_WORKER)
    module = types.ModuleType(_MAIN_IN_WORKER)
    module.__dict__.update(names)
    sys.modules["__main__"] = sys.modules[_MAIN_IN_WORKER] = module


@contextmanager
def _importing_main() -> Iterator[None]:
    global _is_importing_main  # noqa: PLW0603 - a property of the process
    _is_importing_main = True
    try:
        yield
    finally:
        _is_importing_main = False
