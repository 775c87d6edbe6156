"""Replaces functions of torch for a while, wherever a program holds them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


@contextmanager
def replaced(places: Mapping[tuple[Any, str], Function]) -> Iterator[None]:
    """Replace functions inside the `with` block.

    A program that has imported a function by its name, as by `from torch.nn.utils import clip_grad_norm_`, holds it in
    its own module, so it is replaced in all modules that are loaded, and put back in those that are loaded later. Other
    modules of torch keep theirs: what a function of torch calls inside is not what the program calls.

    Args:
        places: by module of torch and name, what replaces the function there.
    """
    new = {id(getattr(place, name)): it for (place, name), it in places.items()}
    old = {id(it): getattr(place, name) for (place, name), it in places.items()}
    for (place, name), it in places.items():
        setattr(place, name, it)
    _exchange(new)
    try:
        yield
    finally:
        for (place, name), it in places.items():
            setattr(place, name, old[id(it)])
        _exchange(old)


def _exchange(others: Mapping[int, Function]) -> None:
    """Replace the functions with these ids in the modules that are not torch's."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] not in ("torch", __name__.partition(".")[0]):
            for key, value in list(vars(module).items()):
                if id(value) in others:
                    vars(module)[key] = others[id(value)]
