"""Other spellings of documented arguments: scripts use them as keywords, signatures show the documented ones."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def accept_aliases(**documented_names: str) -> Callable[[Callable[Parameters, Result]], Callable[..., Result]]:
    """Let callers give some arguments under another name.

    Args:
        **documented_names: the function's own name of an argument, by the other one.
    """

    def accept(function: Callable[Parameters, Result]) -> Callable[..., Result]:
        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            for alias, name in documented_names.items():
                if alias in kwargs:
                    if name in kwargs:
                        raise TypeError(f"{name} and {alias} are two names of one argument; give one of them")
                    kwargs[name] = kwargs.pop(alias)
            return function(*args, **kwargs)

        return call

    return accept
