"""Tracing a model with torch.fx: its layers stay whole, and only the inputs in use become inputs of the graph.

Cutting the graph into stages is in `traced`.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from torch import fx, nn


class _LayerTracer(fx.Tracer):
    """Keeps layers whole, and inputs that are not passed at the defaults of `forward`."""

    proxy_buffer_attributes = True  # so that a buffer may be cut to the length of an input
    layer_classes: tuple[type[nn.Module] | str, ...] = ()
    layer_names: frozenset[str] = frozenset()
    input_names: tuple[str, ...] = ()
    failed_in: tuple[str, nn.Module] | None = None  # the innermost module whose forward could not be traced

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace as torch.fx does, and note the innermost module that fails."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or (self.path_of_module(m), m)
            raise

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is a layer by class or name, a parallel layer, or a leaf of torch.fx."""
        return (
            module_qualified_name in self.layer_names
            or _is_parallel_layer(m)
            or any(type(m).__name__ == it if isinstance(it, str) else isinstance(m, it) for it in self.layer_classes)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Make placeholders of `input_names` only."""
        inputs = {name: self.create_proxy("placeholder", name, (), {}) for name in self.input_names}

        def traced(root: nn.Module) -> Any:
            return root_fn(root, **inputs)

        return traced, [self.root]


def trace_model(
    module: nn.Module,
    *,
    input_names: Sequence[str] | None = None,
    leaf_classes: Sequence[type[nn.Module] | str] = (),
    leaf_names: Sequence[str] = (),
    autowrap_functions: Sequence[Callable[..., Any]] = (),
    autowrap_modules: Sequence[ModuleType] = (),
    autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
    tracer_cls: type[fx.Tracer] = fx.Tracer,
) -> fx.Graph:
    """Trace a model's forward.

    Args:
        module: the model.
        input_names: the arguments of `forward` in calls; those without a default if None.
        leaf_classes: classes, or their names, whose modules stay whole.
        leaf_names: modules that stay whole, by name.
        autowrap_functions: functions that stay whole.
        autowrap_modules: Python modules whose functions stay whole.
        autowrap_obj_methods: see `methods_kept_whole`.
        tracer_cls: the base class of the tracer.

    Raises:
        ValueError: `forward` does not take an input, or the model cannot be traced this way.
    """
    parameters = inspect.signature(module.forward).parameters
    if input_names is None:
        positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        input_names = [it.name for it in parameters.values() if it.default is it.empty and it.kind in positional]
    unknown = [name for name in input_names if name not in parameters]
    if unknown and not any(it.kind is it.VAR_KEYWORD for it in parameters.values()):
        raise ValueError(
            f"input_names has {unknown}, which {type(module).__name__}.forward does not take; it takes "
            f"{list(parameters)}"
        )
    made = type("LayerTracer", (_LayerTracer, tracer_cls), {})
    tracer = made(autowrap_modules=(math, *autowrap_modules), autowrap_functions=tuple(autowrap_functions))
    tracer.layer_classes = tuple(leaf_classes)
    tracer.layer_names = frozenset(leaf_names)
    tracer.input_names = tuple(input_names)
    with methods_kept_whole(autowrap_obj_methods or {}):
        try:
            return tracer.trace(module)
        except Exception as error:  # models may raise anything when given proxies instead of values
            raise ValueError(_not_traced(module, error, tracer.failed_in)) from error


@contextmanager
def methods_kept_whole(methods: Mapping[Any, Sequence[str]]) -> Iterator[None]:
    """Return a block in which a trace keeps some methods of some objects whole.

    Args:
        methods: names of methods, by object. The trace does not see the weights of such an object: its stage must have
            them through another call, or the methods must not need any.

    Raises:
        ValueError: an object lacks a method, or the names are not a list.
    """
    for owner, names in methods.items():
        if isinstance(names, str):
            raise ValueError(f"autowrap_obj_methods has {names!r} for {type(owner).__name__}; pass a list of names")
        missing = [name for name in names if not callable(getattr(owner, name, None))]
        if missing:
            raise ValueError(f"autowrap_obj_methods: {type(owner).__name__} has no method {', '.join(missing)}")
    replaced = [(owner, name, owner.__dict__.get(name)) for owner, names in methods.items() for name in names]
    for owner, name, _ in replaced:
        setattr(owner, name, _as_one_node(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, before in replaced:
            if before is None:  # the class's method, hidden by the object's attribute
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _as_one_node(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it becomes one node of the graph if it is called with proxies."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxies: list[fx.Proxy] = []
        fx.node.map_aggregate((args, kwargs), lambda it: proxies.append(it) if isinstance(it, fx.Proxy) else None)
        if not proxies:
            return method(*args, **kwargs)
        return proxies[0].tracer.create_proxy("call_function", method, args, kwargs)

    return call


def _not_traced(module: nn.Module, error: Exception, failed_in: tuple[str, nn.Module] | None) -> str:
    where, leaf = "in its own forward", "..."
    if failed_in is not None:
        path, inner = failed_in
        where = f"in the forward of {path!r}, a {type(inner).__name__}"
        leaf = repr(type(inner).__name__)
    return (
        f"{type(module).__name__} cannot be traced {where}: {type(error).__name__}: {error}. Keep "
        f"modules whole by leaf_module_cls=[{leaf}] or functions by autowrap_functions, list only the inputs in use in "
        "input_names, cut a transformers model by its structure (tracer_cls='hf'), or write the stages by hand "
        "(stages=[...])"
    )


def _is_parallel_layer(module: nn.Module) -> bool:
    """Whether a module is a layer of nxd_layers with weights, or of a class derived from one.

    Its forward communicates and must stay whole.
    """
    is_layer = any(it.__module__.partition(".")[0] == "nxd_layers" for it in type(module).__mro__)
    return is_layer and any(True for _ in module.parameters(recurse=False))
