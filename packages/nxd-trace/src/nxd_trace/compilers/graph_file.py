"""Stores a recorded graph as two files of pure data: `program.json` and `constants.safetensors`.

torch's own loader (`torch.export.load`) unpickles members of the archive, evaluates expressions and resolves names from
the file, so it can run a stranger's code. These files can only name operators of a fixed list, with arguments of a
fixed list of types:

    {"nodes": [["input"], ["input"], ["aten.mm.default", [{"value": 1}, {"value": 0}], {}]], "outputs": [{"value": 2}]}

A node is an input (constants come first) or an operator with its arguments and keyword arguments. An argument is null,
a boolean, a number, a string, a list, the value of a node by its index, `{"dtype": "float32"}`, `{"device": "cpu"}`,
`{"layout": "strided"}`, `{"memory_format": "contiguous_format"}`, or, for operators such as `cond`, `{"graph": {...}}`.
"""

import inspect
import json
import math
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch
from nxd_state.device import DEVICE_TYPES
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from nxd_trace.weights import open_safetensors, save_safetensors

GRAPH, CONSTANTS = "program.json", "constants.safetensors"
VERSION = 1

_DEVICE = rf"({'|'.join((*DEVICE_TYPES, 'meta'))})(:\d{{1,3}})?"

# Besides operators: arithmetic on sizes, and control flow, whose graphs are checked like the outer one.
_SIZES = tuple(f"sym_{name}" for name in ("float", "int", "ite", "max", "min", "not", "sum"))
_ARITHMETIC = (
    *("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "and_", "or_"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
_CONTROL_FLOW = ("cond", "map_impl", "while_loop", "wrap_with_autocast", "wrap_with_set_grad_enabled")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"torch.{name}": getattr(torch, name) for name in _SIZES},
    **{f"operator.{name}": getattr(operator, name) for name in _ARITHMETIC},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    **{f"higher_order.{name}": getattr(torch.ops.higher_order, name) for name in _CONTROL_FLOW},
}

# Operators with one leading underscore are internal to torch, and many trust their arguments. These operators check
# them, and so do torch's core operators.
_CHECKED_INNER = frozenset(
    f"_{name}"
    for name in (
        *("assert_async", "assert_scalar", "assert_tensor_metadata", "grouped_mm", "int_mm", "scaled_mm"),
        *("native_multi_head_attention", "transformer_encoder_layer_fwd", "unsafe_view"),
    )
)
# Operators of other libraries with an equivalent in torch, which is stored instead.
_TORCHS_OWN = {"transformers.grouped_mm_fallback.default": "aten._grouped_mm.default"}
_DEEPEST_LIST = 8
_INPUT = "input"
_INSTEAD = "compiler 'export' does not support this; use compiler='inductor'"
_OPENS_FILES = frozenset({"from_file"})


def write_graph(exported: ExportedProgram, folder: Path) -> None:
    """Write a graph whose only inputs are constants and user inputs."""
    constants = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.CONSTANT_TENSOR:
            constants.append(exported.constants[str(spec.target)])
        elif spec.kind != InputKind.USER_INPUT:
            raise ValueError(f"the model holds {spec.target!r}, a {spec.kind.name}; only tensors can be saved")
    (folder / GRAPH).write_text(json.dumps(_graph_to_json(exported.graph_module)), encoding="utf-8")
    save_safetensors(
        {str(index): constant.detach().cpu().clone().contiguous() for index, constant in enumerate(constants)},
        folder / CONSTANTS,
    )


def read_graph(folder: Path) -> tuple[list[Tensor], fx.GraphModule]:
    """Read a graph and check it completely, without running anything.

    Returns:
        The constants, and the graph, whose forward takes the constants and the inputs.

    Raises:
        ValueError: the files do not hold a valid graph.
    """
    with open_safetensors(folder / CONSTANTS) as stored:
        names = set(stored.keys())
        if names != {str(index) for index in range(len(names))}:
            raise ValueError(f"{CONSTANTS} holds {shortened(sorted(names))}; expected constants named 0, 1, ...")
        constants = [stored.get_tensor(str(index)).clone() for index in range(len(names))]
    try:
        return constants, _graph_from_json(json.loads((folder / GRAPH).read_bytes()))
    except RecursionError:
        raise ValueError(f"{GRAPH} is nested too deeply for any program") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{GRAPH}: {error}") from error


def _graph_to_json(module: fx.GraphModule) -> dict[str, Any]:
    numbers: dict[fx.Node, int] = {}
    nodes: list[Any] = []
    outputs: Any = None

    def encoded(value: Any) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list() | tuple():
                return [encoded(part) for part in value]
            case fx.Node(op="get_attr", target=str(name)) if isinstance(getattr(module, name), fx.GraphModule):
                return {"graph": _graph_to_json(getattr(module, name))}
            case fx.Node() if value in numbers:
                return {"value": numbers[value]}
            case torch.device():
                return {"device": str(value)}
            case torch.dtype() | torch.layout() | torch.memory_format():
                return {type(value).__name__: str(value).removeprefix("torch.")}
        raise ValueError(f"the graph holds {value!r}, a {type(value).__name__}; {_INSTEAD}")

    stored: list[Any]
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                stored = [_INPUT]
            case "call_function":
                kwargs = {name: encoded(value) for name, value in node.kwargs.items()}
                stored = [_name_of(node.target), encoded(node.args), kwargs]
            case "output":
                outputs = encoded(node.args[0])
                continue
            case "get_attr":  # stored where it is used
                continue
            case _:
                raise ValueError(f"the graph holds {node.op} {node.target!r}; {_INSTEAD}")
        numbers[node] = len(nodes)
        nodes.append(stored)
    return {"nodes": nodes, "outputs": outputs}


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}.{target._schema.name.partition('::')[2]}.{target._overloadname}"
        if name in _TORCHS_OWN:
            return _TORCHS_OWN[name]
        if _operator(name) is target:
            return name
    for name, function in _FUNCTIONS.items():
        if target is function:
            return name
    raise ValueError(f"the graph calls {target}; {_INSTEAD}")


@cache
def _registered() -> frozenset[str]:
    """The dispatcher's operators; `torch.ops` also has TorchScript's functions, such as one that writes a file."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def _operator(name: str) -> Any:
    """Return the operator or function of this name; None if it is not allowed."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    match name.split("."):
        case [("aten" | "_c10d_functional") as namespace, base, overload]:
            pass
        case _:
            return None
    if f"{namespace}::{base}" + ("" if overload == "default" else f".{overload}") not in _registered():
        return None
    found = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    if namespace == "aten" and (
        base in _OPENS_FILES
        or (re.match("_[^_]", base) and base not in _CHECKED_INNER and torch.Tag.core not in found.tags)
    ):
        return None
    return found


def _graph_from_json(stored: Any) -> fx.GraphModule:
    match stored:
        case {"nodes": list(nodes), "outputs": outputs} if len(stored) == 2:
            pass
        case _:
            raise ValueError(f"{shortened(stored)} is not a graph; expected an object of nodes and outputs")
    root, graph = nn.Module(), fx.Graph()
    values: list[fx.Node] = []

    def decoded(value: Any, depth: int = 0) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list() if depth < _DEEPEST_LIST:
                return [decoded(part, depth + 1) for part in value]
            case {"value": int(number)} if len(value) == 1 and 0 <= number < len(values):
                return values[number]
            case {"graph": inner} if len(value) == 1:
                name = f"graph_{len(root._modules)}"
                root.add_module(name, _graph_from_json(inner))
                return graph.get_attr(name)
            case {"device": str(device)} if len(value) == 1 and re.fullmatch(_DEVICE, device):
                with suppress(RuntimeError):  # torch has no device of this type here
                    return torch.device(device)
            case {"dtype": str(name)} | {"layout": str(name)} | {"memory_format": str(name)} if len(value) == 1:
                kind = getattr(torch, next(iter(value)))
                if isinstance(found := getattr(torch, name, None), kind):
                    return found
        raise ValueError(f"{shortened(value)} is not a value that a program can hold")

    for index, node in enumerate(nodes):
        try:
            values.append(
                graph.placeholder(f"input_{index}")
                if node == [_INPUT]
                else graph.call_function(*_call_from_json(node, decoded))
            )
        except ValueError as error:
            raise ValueError(f"node {index}: {error}") from None
    result = decoded(outputs)
    graph.output(tuple(result) if isinstance(result, list) else result)
    try:
        return fx.GraphModule(root, graph)
    except SyntaxError as error:  # an argument is named "from"
        raise ValueError(f"fx cannot write this graph as Python: {error.msg}") from None


def _call_from_json(
    node: Any, decoded: Callable[[Any], Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function, arguments and keyword arguments of a node.

    fx generates and runs Python code that contains the keywords literally, so each must be one of the operator's.
    """
    match node:
        case [str(name), list(args), dict(kwargs)]:
            pass
        case _:
            raise ValueError(f"{shortened(node)} is not a node; expected an operator, a list and an object")
    function = _operator(name)
    if function is None:
        raise ValueError(f"{shortened(name)} is not an operator that a program may call")
    if isinstance(function, torch._ops.OpOverload):
        known = {argument.name for argument in function._schema.arguments}
    else:
        known = set()
        try:
            inspect.signature(function).bind(*args)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
    if unknown := kwargs.keys() - known:
        raise ValueError(f"{name} has no argument {shortened(min(unknown))}")
    return function, tuple(map(decoded, args)), {key: decoded(value) for key, value in kwargs.items()}
