"""Runs at the start of each Python process of a command of `nxd-parity run`: seeds it, and records it from a model on.

Python imports a module of this name when it starts, if one is on its path. This one waits for numpy and torch to be
imported, so that processes without them lose no time, and for the first call of a module with parameters: processes
that call none, such as torchrun's own, compile workers and data loader workers, are not recorded.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SEED = 0


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self._name, self._function = name, function
        self._is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._function(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _prepare_torch(torch: Any) -> None:
    torch.manual_seed(SEED)
    options = json.loads(os.environ["NXD_PARITY_RUN"])
    if options["float64"]:
        from nxd_parity.float64 import InFloat64  # noqa: PLC0415

        InFloat64().__enter__()
    original = torch.nn.Module.__call__

    def call(module: Any, *given: Any, **named: Any) -> Any:
        is_elsewhere = torch.compiler.is_compiling() or torch.utils.data.get_worker_info() is not None
        if not is_elsewhere and next(module.parameters(), None) is not None:
            torch.nn.Module.__call__ = original
            _begin(options)
        return original(module, *given, **named)

    torch.nn.Module.__call__ = call


def _begin(options: Any) -> None:
    try:
        from nxd_parity.program import begin  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"nxd-parity run records programs whose Python has nxd-parity; {sys.executable} does not: {error}"
        ) from error
    begin(**options)


def _run_next_sitecustomize(own_folder: str) -> None:
    """Run the module of this name that Python would have run without this one."""
    sys.path[:] = [it for it in sys.path if os.path.abspath(it) != own_folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "NXD_PARITY_RUN" in os.environ:
    random.seed(SEED)
    sys.meta_path.insert(0, _AfterImport("numpy", lambda numpy: numpy.random.seed(SEED)))
    sys.meta_path.insert(0, _AfterImport("torch", _prepare_torch))
_run_next_sitecustomize(os.path.dirname(os.path.abspath(__file__)))
