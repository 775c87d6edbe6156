"""A backward in two halves: gradients of a stage's inputs, and later those of its weights.

The idea is that of Qi et al. 2023, "Zero Bubble Pipeline Parallelism": other stages wait for the first half only. The
graph is cut at the *split points*, where weights meet values that depend on the inputs. The first half keeps the
gradient of each split point, and the second continues from there to the weights. So every operation runs in one half,
except the split points, which compute one part of their gradients in each. A custom `torch.autograd.Function` among
them learns from `ctx.needs_input_grad` which part is requested.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules.module import register_module_forward_pre_hook

Gradients = tuple[Tensor | None, ...]

# These cannot run twice, or would do all their work twice: whole layers that are one node.
_INDIVISIBLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})


class SplitBackward:
    """One microbatch's backward of one stage.

    Gradients of weights are those of a plain backward, and hooks on parameters are called once. There are exceptions
    to what runs when: weights that join in several places get their gradients in the first half; and so does
    everything where a module runs again during backward (activation checkpointing) or is one node of the graph
    (torch.compile). Hooks on activations that weights join are called in both halves, and count once.

    Attributes:
        is_indivisible: whether the first half had to run a plain backward.
    """

    def __init__(
        self, roots: Sequence[GradientEdge], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> None:
        """Run the first half, which adds to the gradients of `inputs`, leaf tensors.

        Args:
            roots: outputs of the stage and its loss, as far as they need gradients.
            gradients: gradients of the roots.
            inputs: inputs of the stage that need gradients.
        """
        self.is_indivisible = False
        self._roots, self._gradients = list(roots), list(gradients)  # later those that do not depend on the inputs
        self._weights_of_roots: list[Tensor] | None = None  # all, if None
        self._split_points: list[_SplitPoint] = []
        if inputs and roots:
            self._run_first_half(inputs)

    def compute_weights(self) -> None:
        """Run the second half, which adds to the gradients of weights; once."""
        while self._split_points:  # each lets its gradients go
            self._split_points.pop().compute_weights()
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients, inputs=self._weights_of_roots)
        self._roots, self._gradients = [], []

    def _run_first_half(self, inputs: Sequence[Tensor]) -> None:
        reach, owners = _explore(self._roots, inputs)
        if not _INDIVISIBLE.isdisjoint({type(node).__name__ for node in reach}):
            torch.autograd.backward(self._roots, self._gradients)
            self.is_indivisible = True
            self._roots, self._gradients = [], []
            return
        outside = [edge for edge in self._roots if not reach[edge.node].inputs]
        roots_weights = frozenset[Tensor]().union(*(reach[edge.node].weights for edge in outside))
        found = {node: it.weights for node, it in reach.items() if it.inputs and it.weights}
        places = Counter(weight for weights in (*found.values(), roots_weights) for weight in weights)
        several = [weight for weight, number in places.items() if number > 1]
        once = places.keys() - set(several)
        self._split_points = [
            _SplitPoint(node, owners.get(node), weights & once, reach)
            for node, weights in found.items()
            if weights & once
        ]
        with ExitStack() as stack:
            ran = stack.enter_context(_modules_that_run())
            for split_point in self._split_points:
                stack.enter_context(split_point.gradients_kept())
            torch.autograd.backward(self._roots, self._gradients, inputs=[*inputs, *several], retain_graph=True)
        self.is_indivisible = bool(ran)
        self._weights_of_roots = list(roots_weights & once)
        kept = [index for index, edge in enumerate(self._roots) if not reach[edge.node].inputs]
        self._roots = [self._roots[index] for index in kept if self._weights_of_roots]
        self._gradients = [self._gradients[index] for index in kept if self._weights_of_roots]


@dataclass(frozen=True, slots=True)
class _Reach:
    """The leaves that backward reaches from a node of the graph."""

    inputs: bool  # whether it reaches inputs
    weights: frozenset[Tensor]  # weights, reached through nodes that do not reach inputs


_NOTHING = _Reach(inputs=False, weights=frozenset())
_INPUTS_ONLY = _Reach(inputs=True, weights=frozenset())


def _explore(
    roots: Iterable[GradientEdge], inputs: Sequence[Tensor]
) -> tuple[dict[Node, _Reach], dict[Node, Node | None]]:
    """Return the reach of each node of the graph, and the nodes that keep nodes of custom functions alive.

    Before torch 2.13 the Python object of such a node does not own it, unlike that of torch's own nodes.
    """
    known = {id(tensor) for tensor in inputs}
    reach: dict[Node, _Reach] = {}
    owners: dict[Node, Node | None] = {edge.node: edge.ownership_token for edge in roots if _is_custom(edge.node)}
    behind: dict[Node, list[Node]] = {}
    stack = [edge.node for edge in roots]
    while stack:
        node = stack[-1]
        if node in reach:
            stack.pop()
        elif node in behind:  # its children have been explored
            stack.pop()
            reach[node] = _reach_over([reach[it] for it in behind[node]])
        else:
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                reach[node] = _INPUTS_ONLY if id(leaf) in known else _Reach(inputs=False, weights=frozenset((leaf,)))
            behind[node] = [child for child, _ in node.next_functions if child is not None]
            stack += behind[node]
            for child in behind[node]:
                if _is_custom(child):
                    owners.setdefault(child, owners.get(node, node))
    return reach, owners


def _is_custom(node: Any) -> bool:
    """Whether an `autograd.Function` made the node; for type checkers that is not a `Node`."""
    return isinstance(node, BackwardCFunction)


def _reach_over(behind: Sequence[_Reach]) -> _Reach:
    """Return the reach of a node from that of its children."""
    if len(behind) == 1:  # as for most nodes
        return _INPUTS_ONLY if behind[0].inputs else behind[0]
    weights = [it.weights for it in behind if it.weights and not it.inputs]
    if not weights:
        return _INPUTS_ONLY if any(it.inputs for it in behind) else _NOTHING
    return _Reach(any(it.inputs for it in behind), frozenset[Tensor]().union(*weights))


class _SplitPoint:
    """A node that reaches inputs, and weights that no other node reaches."""

    def __init__(self, node: Node, owner: Node | None, weights: frozenset[Tensor], reach: dict[Node, _Reach]) -> None:
        self._node = node
        self._owner = owner  # keeps the node alive
        self._weights = list(weights)
        self._gradients: Gradients = ()  # of what the node computed
        edges = [reach[child] for child, _ in node.next_functions if child is not None]
        self._for_weights = [not it.inputs and not weights.isdisjoint(it.weights) for it in edges]
        self._for_inputs = [it.inputs or not it.weights <= weights for it in edges]

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Keep the gradients that arrive at the node during the first half."""
        handle = self._node.register_prehook(self._keep)
        try:
            with self._requesting(self._for_inputs):
                yield
        finally:
            handle.remove()

    def compute_weights(self) -> None:
        """Continue from the kept gradients to the weights."""
        edges = [GradientEdge(self._node, index) for index, it in enumerate(self._gradients) if it is not None]
        if not edges:
            return
        # Hooks on the activation have been called already: their results do not count now.
        handle = self._node.register_prehook(lambda _: self._gradients)
        try:
            with self._requesting(self._for_weights):
                torch.autograd.backward(edges, [it for it in self._gradients if it is not None], inputs=self._weights)
        finally:
            handle.remove()

    def _keep(self, gradients: Gradients) -> None:
        self._gradients = tuple(gradients)

    @contextmanager
    def _requesting(self, edges: Sequence[bool]) -> Iterator[None]:
        """Tell a custom function which of its arguments' gradients are computed now."""
        function: Any = self._node
        needed = getattr(function, "needs_input_grad", None)  # torch's own nodes have none and need none
        if needed is None:
            yield
            return
        asked = iter(edges)
        function.needs_input_grad = tuple(it and next(asked, True) for it in needed)
        try:
            yield
        finally:
            function.needs_input_grad = needed


@contextmanager
def _modules_that_run() -> Iterator[list[nn.Module]]:
    """Collect the modules whose forward is called in the body."""
    ran: list[nn.Module] = []
    handle = register_module_forward_pre_hook(lambda module, _: ran.append(module))
    try:
        yield ran
    finally:
        handle.remove()
