"""Puts the names of a model's modules into the graphs that torch-xla makes of it, including those of its backward.

torch-xla prefixes an operation's name with the scopes that are open when it is recorded. Here a scope is open while a
module's forward runs, and while the autograd nodes that it created run in backward. The operations do not change, so
names cost no compilation.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nxd_state.device import check_torch_xla, torch_xla_module
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

_ACCUMULATE = "torch::autograd::AccumulateGrad"  # lives as long as its parameter, so a hook on it would stay


@contextmanager
def module_scopes(model: nn.Module) -> Iterator[None]:
    """Inside, operations that `model`'s modules record carry the module's path, such as "layers.0.mlp".

    Operations outside of any submodule, such as the optimizer's step, have none. Names appear in torch-xla's graphs
    after `start_capture()`, or with `XLA_IR_DEBUG=1` and `XLA_HLO_DEBUG=1` in the environment.

    Raises:
        ModuleNotFoundError: torch-xla is not installed.
    """
    check_torch_xla("naming operations in graphs")
    open_scope = torch_xla_module()._XLAC.profiler.scope_pusher
    scopes = _Scopes(open_scope)
    nodes = _NodesOfModules(scopes)
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(nodes.entering(path), with_kwargs=True))
        handles.append(module.register_forward_hook(nodes.leaving(path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Scopes(threading.local):
    """The scopes that are open in this thread; backward runs in its own threads.

    Args:
        open_scope: function that opens a scope by name; dropping its result closes the scope.
    """

    def __init__(self, open_scope: Callable[[str], object]) -> None:
        self._open_scope = open_scope
        self._open: list[tuple[str, object]] = []

    def push(self, path: str) -> None:
        outer = self._open[-1][0] if self._open else ""
        name = path.removeprefix(f"{outer}.") if outer else path
        self._open.append((path, self._open_scope(name) if name else None))

    def pop(self) -> None:
        self._open.pop()


class _NodesOfModules:
    """Finds the autograd nodes that each module has created, and lets them open the module's scope in backward.

    They are the nodes between the module's results and its inputs that no module called inside has taken before.
    """

    def __init__(self, scopes: _Scopes) -> None:
        self._scopes = scopes
        self._taken: dict[Node, int] = {}  # node to the number of nodes taken before it
        self._entered: list[tuple[int, set[Node]]] = []

    def entering(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._entered.append((len(self._taken), _makers((args, kwargs))))
            self._scopes.push(path)

        return hook

    def leaving(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            self._scopes.pop()
            taken_before, inputs = self._entered.pop()
            self._take(path, _makers(result), inputs, taken_before)
            if not self._entered:
                self._taken.clear()

        return hook

    def _take(self, path: str, results: set[Node], inputs: set[Node], taken_before: int) -> None:
        waiting, seen = list(results - inputs), set(results | inputs)
        while waiting:
            node = waiting.pop()
            if self._taken.get(node, taken_before) < taken_before or node.name() == _ACCUMULATE:
                continue
            if path and node not in self._taken:
                node.register_prehook(lambda _gradients: self._scopes.push(path))
                node.register_hook(lambda _inputs, _results: self._scopes.pop())
            self._taken.setdefault(node, len(self._taken))
            found = {following for following, _ in node.next_functions if following is not None} - seen
            seen |= found
            waiting.extend(found)


def _makers(value: Any) -> set[Node]:
    return {leaf.grad_fn for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
