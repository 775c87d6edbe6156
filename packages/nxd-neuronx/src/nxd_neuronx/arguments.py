"""Arguments as scripts for NeuronX Distributed give them: in that library's order, under its names, or without effect.

Its documents and its code order the arguments of layers differently. Both orders work: the type of one argument tells
which order it is. Arguments that could not change any number here are accepted, and the log says so once.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

Names = ParamSpec("Names")
Result = TypeVar("Result")

_logger = logging.getLogger(__name__)


def takes_order_too(
    init: Callable[..., None],
    names: str,
    *,
    tells: Callable[[tuple[Any, ...]], bool],
    ignored: Mapping[str, str] | None = None,
) -> Callable[..., None]:
    """Return an `__init__` that also takes its positional arguments in a second order.

    Args:
        init: the layer's own `__init__`.
        names: the arguments in the second order, separated by spaces; the attribute `other_order` of the result.
        tells: whether positional arguments are in the second order, by their types.
        ignored: arguments that are accepted without effect, with the reason for the log.
    """
    ignored = ignored or {}
    other_order = tuple(names.split())
    signature = inspect.signature(init)
    positional = [it for it in signature.parameters.values() if it.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    own_names = [it.name for it in positional[1:]]

    @wraps(init)
    def initialize(layer: Any, /, *args: Any, **kwargs: Any) -> None:
        order = other_order if tells(args) else own_names
        if len(args) > len(order):
            raise TypeError(f"{len(args)} positional arguments are given; expected {len(order)} or fewer")
        if twice := [name for name in order[: len(args)] if name in kwargs]:
            raise TypeError(f"{type(layer).__name__}.__init__() got multiple values for argument {twice[0]!r}")
        arguments = dict(zip(order, args, strict=False)) | kwargs
        for name, why in ignored.items():
            if arguments.pop(name, False):
                say_without_effect(name, why)
        if isinstance(arguments.get("device"), bool):  # as one document spells None
            arguments["device"] = None
        init(layer, **arguments)

    also = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False) for name in ignored]
    vars(initialize)["other_order"] = other_order
    vars(initialize)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), *also])
    return initialize


def takes_names_too(**documented_names: str) -> Callable[[Callable[Names, Result]], Callable[Names, Result]]:
    """Let callers give arguments of a function under another name.

    Args:
        **documented_names: the function's own name of an argument, by the other one; the attribute `other_names` of
            what is returned.
    """

    def decorate(function: Callable[Names, Result]) -> Callable[Names, Result]:
        @wraps(function)
        def call(*args: Names.args, **kwargs: Names.kwargs) -> Result:
            for other, name in documented_names.items():
                if other in kwargs:
                    if name in kwargs:
                        raise TypeError(f"{name} and {other} are two names of one argument; give one of them")
                    kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        vars(call)["other_names"] = dict(documented_names)
        return call

    return decorate


def fifth_is_dtype(args: tuple[Any, ...]) -> bool:
    """Whether `dtype` stands where the documents of linear layers have `sequence_parallel_enabled`."""
    return len(args) > 4 and isinstance(args[4], torch.dtype)


@cache  # once for each argument, not for each layer
def say_without_effect(argument: str, why: str) -> None:
    """Log that an argument is taken and has no effect."""
    _logger.info("%s has no effect here: %s", argument, why)
