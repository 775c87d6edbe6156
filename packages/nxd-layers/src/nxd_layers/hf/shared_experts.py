"""Shared experts of unmodified models, computed while ranks tell each other how many tokens will come.

Most blocks of transformers call their routed experts first, and their shared experts then, of the block's own input. So
these can be computed before they are called. Which blocks do is read from the code of their forward, and so is the same
on all ranks, and when activation checkpointing runs it again.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

_NAMES = ("shared_experts", "shared_expert", "shared_mlp")


def overlap_shared_experts(block: nn.Module, experts: str) -> Callable[[], None] | None:
    """Have shared experts take what was computed early.

    Args:
        block: with the experts, called with hidden states first.
        experts: the name of the routed ones in it.

    Returns:
        What computes the shared experts early, for `meanwhile` of the dispatch; None if this block has none, or calls
        them otherwise.
    """
    for name in _NAMES:
        if isinstance(getattr(block, name, None), nn.Module) and _calls_after(type(block).forward, experts, name):
            return _Early(block, getattr(block, name)).compute
    return None


class _Early:
    def __init__(self, block: nn.Module, shared: Any) -> None:
        self._shared, self._forward = shared, shared.forward
        self._input: Tensor | None = None  # of the block that runs
        self._output: Tensor | None = None
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        shared.forward = self._take

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._input, self._output = next(iter((*args, *kwargs.values())), None), None

    def compute(self) -> None:
        if self._input is not None and not self._shared._forward_pre_hooks:  # these might give it another input
            self._output = self._forward(self._input)

    def _take(self, *args: Any, **kwargs: Any) -> Any:
        output, given = self._output, self._input
        self._output = self._input = None
        if output is not None and not kwargs and len(args) == 1 and args[0] is given:
            return output
        return self._forward(*args, **kwargs)


@cache
def _calls_after(forward: Callable[..., Any], experts: str, shared: str) -> bool:
    """Whether a forward calls its experts once, and then `self.shared` once, of nothing but its own first input."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError):
        return False
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return False
    of_experts, of_shared = _calls(function, experts), _calls(function, shared)
    if len(of_experts) != 1 or len(of_shared) != 1:
        return False
    call = of_shared[0]
    if call.lineno <= of_experts[0].lineno or call.keywords or len(call.args) != 1:
        return False
    return _is_first_input(call.args[0], call.lineno, function)


def _calls(function: ast.FunctionDef, name: str) -> list[ast.Call]:
    calls = [it for it in ast.walk(function) if isinstance(it, ast.Call)]
    return [it for it in calls if ast.unparse(it.func) == f"self.{name}"]


def _is_first_input(value: ast.expr, line: int, function: ast.FunctionDef) -> bool:
    """Whether a name is, at a line, still what the function was called with."""
    if not isinstance(value, ast.Name):
        return False
    changes = [
        (it.lineno, ast.unparse(it.value))
        for it in ast.walk(function)
        if isinstance(it, ast.Assign | ast.AugAssign)
        and it.lineno < line
        and value.id in {name.id for name in ast.walk(it) if isinstance(name, ast.Name) and _is_stored(name)}
    ]
    first = function.args.args[1].arg
    if value.id == first:
        return not changes
    return (
        len(changes) == 1
        and changes[0][1] == first
        and _is_first_input(ast.Name(first, ast.Load()), changes[0][0], function)
    )


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)
