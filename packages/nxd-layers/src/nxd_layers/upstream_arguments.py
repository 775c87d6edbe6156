"""Arguments of layers as scripts for NeuronX Distributed give them: in that library's order, and without effect here.

Its documents and its code order the same arguments differently. Both orders work: the type of one argument tells which
it is. An argument that could not change any number here is taken, and a line of the log says so.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

Layer = TypeVar("Layer")
Parameters = ParamSpec("Parameters")
Names = ParamSpec("Names")
Result = TypeVar("Result")
Init = Callable[Concatenate[Layer, Parameters], None]

_logger = logging.getLogger(__name__)


def takes_order_too(
    names: Sequence[str], *, tells: Callable[[tuple[Any, ...]], bool]
) -> Callable[[Init[Layer, Parameters]], Init[Layer, Parameters]]:
    """Let an `__init__` take its positional arguments in a second order.

    Args:
        names: the arguments in that order; the attribute `other_order` of what is returned.
        tells: whether positional arguments are in that order, by their types.
    """

    def decorate(init: Init[Layer, Parameters]) -> Init[Layer, Parameters]:
        other: Callable[..., None] = init

        @wraps(init)
        def initialize(layer: Layer, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            if not tells(args):
                init(layer, *args, **kwargs)
                return
            if len(args) > len(names):
                raise TypeError(f"{len(args)} positional arguments are given; expected {len(names)} or fewer")
            other(layer, **dict(zip(names, args, strict=False)), **kwargs)

        vars(initialize)["other_order"] = tuple(names)
        return initialize

    return decorate


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
    """Log that an argument is taken and changes nothing."""
    _logger.info("%s has no effect here: %s", argument, why)


def checked_rank_ordering(rank_ordering: Sequence[int] | None, size: int) -> tuple[int, ...] | None:
    """The order as a tuple.

    Raises:
        ValueError: it is no permutation of the ranks.
    """
    if rank_ordering is None:
        return None
    if sorted(rank_ordering) != list(range(size)):
        raise ValueError(f"rank_ordering={list(rank_ordering)} must name each of the ranks 0..{size - 1} once")
    return tuple(rank_ordering)
