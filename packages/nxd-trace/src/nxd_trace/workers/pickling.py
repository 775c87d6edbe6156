"""Sends a user's function to the workers by pickle, with clear errors if that fails.

A function is pickled as its module and name, so workers import the module. If that is the main script, they import it
under the name `__mp_main__`, as multiprocessing does, but only when the function needs it. Objects that cannot be
imported (a function within a function, a class of a notebook) are sent by value if cloudpickle is installed.
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
_preparation: dict[str, str] = {}  # of this process's workers


def prepare_workers(function: Callable[[], object]) -> None:
    """Have each worker call a function before it imports anything it is sent, for example to install modules.

    Args:
        function: a function at the top level of a module other than the main script. A later one replaces it.
    """
    _preparation["prepare"] = f"{function.__module__}:{function.__qualname__}"


def main_script() -> dict[str, str]:
    """Return the location of the main module, for workers that need its functions, and the function to call first."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    where = {"name": name} if name else {"path": os.path.abspath(path)} if path else {}
    return {**where, **_preparation}


def dumps_for_workers(value: Any, what: str) -> bytes:
    """Pickle `value`, by value if workers cannot import it and cloudpickle is installed; errors call it `what`."""
    try:
        data = pickle.dumps(value)
    except Exception as error:  # an object's own __reduce__ may raise anything
        reason = str(error)
    else:
        main = sys.modules["__main__"]
        is_importable = getattr(main, "__spec__", None) is not None or hasattr(main, "__file__")
        if b"__main__" not in data or is_importable:
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
    """Load an object from `dumps_for_workers`. `main` is the parent's `main_script`."""
    try:
        if "prepare" in main:
            _prepare(main["prepare"])
        return _Unpickler(io.BytesIO(data), main).load()
    except (ImportError, AttributeError) as error:
        raise TypeError(
            f"a worker process cannot import an object that it was sent: {error}. Workers import by module and name "
            "along the sys.path of the process that started them; put func into a module on that path"
        ) from error


def check_not_in_worker() -> None:
    """Check, before starting processes, that this process is not a worker."""
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


@cache
def _prepare(function: str) -> None:
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)()


@cache
def _import_main(kind: str, where: str) -> None:
    """Import the main module; `kind` is "name" if it was started with `python -m`, "path" if it is a script."""
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
