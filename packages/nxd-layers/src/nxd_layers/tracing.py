"""Makes each function of this package a single call in a torch.fx trace, which does not record its body.

These functions check shapes, communicate, and compute different values on each rank, which a graph cannot record. Each
public function is marked as a leaf where it is defined: it needs no `torch.fx.wrap`, and a tracer no list of leaves.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import fx, nn

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


_IS_TORCH_2_11 = torch.__version__.startswith("2.11.")


def mixes_up_saved_tensors() -> bool:
    """Whether torch 2.11's compiler records, which gives the backward of some functions other tensors than they saved.

    Their forward is right and their gradients are wrong, without an error. Other versions of torch are not concerned.
    """
    return _IS_TORCH_2_11 and torch.compiler.is_compiling()


def is_traced(value: object) -> bool:
    """Whether it stands for a value in a trace of torch.fx."""
    return isinstance(value, fx.Proxy)


def leaf_of_traces(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a function one call in the graph of any trace, however the function was imported.

    A module argument, such as the head of a model, becomes an attribute of the traced model in the graph.
    """

    @wraps(function)
    def leaf(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for value in (*args, *kwargs.values()):
            if is_traced(value):
                return cast(Result, _call_in_graph(cast(fx.Proxy, value).tracer, leaf, args, kwargs))
        return function(*args, **kwargs)

    return leaf


def _call_in_graph(
    tracer: fx.proxy.TracerBase, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Proxy:
    def as_node(value: Any) -> Any:
        if isinstance(value, nn.Module) and isinstance(tracer, fx.Tracer):
            return tracer.create_proxy("get_attr", tracer.path_of_module(value), (), {})
        return value

    made: fx.Proxy = tracer.create_proxy(
        "call_function",
        function,
        tuple(as_node(value) for value in args),
        {name: as_node(value) for name, value in kwargs.items()},
    )
    return made
