"""Modules that stand in for those of a library that is not installed; errors list what they have.

What is in them is in `xla_stand_in` and `neuron_stand_in`.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def modules_in_place(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Return a block in which these modules can be imported.

    Args:
        modules: the content of each module by its full name, parents first.
    """
    for name, content in modules.items():
        module = ModuleType(name, f"Stands in for `{name}`, see nxd_neuronx.stand_in_modules.")
        module.__path__ = []  # a package, so that its submodules are found
        module.__spec__ = ModuleSpec(name, None)  # no origin: not the library
        module.__dict__.update(content)
        module.__dict__["__getattr__"] = partial(_refuse_attribute, name)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    finder = _RefusesSubmodules(modules)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in modules:
            sys.modules.pop(name, None)


def _refuse_attribute(module: str, name: str) -> Any:
    raise AttributeError(_lacks(module, name))


class _RefusesSubmodules:
    """Finds no module, but raises an error for those that stand-in modules lack.

    `from MODULE import NAME` raises it too: Python also looks for NAME as a submodule.
    """

    def __init__(self, modules: Mapping[str, Mapping[str, Any]]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise if a stand-in module is asked for a submodule; it has been searched already."""
        parent, _, last = name.rpartition(".")
        if parent in self._modules:
            # without `name=`, which would make `from MODULE import NAME` replace this error by its own
            raise ModuleNotFoundError(_lacks(parent, last))


def _lacks(module: str, name: str) -> str:
    library = module.partition(".")[0].replace("_", "-")
    has = sorted(it for it in vars(sys.modules[module]) if it == "__version__" or not it.startswith("__"))
    return (
        f"{library} is not installed, and the stand-in for {module} has no {name!r}; it has {', '.join(has)}. Use "
        f"one of these, or import {name} only where {library} is installed"
    )
