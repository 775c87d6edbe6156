"""Records a model's outputs in a step by module, the order of its gradients, and the values of its parameters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from nxd_state import ShardSpec, get_shard_spec
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class ActivationRecord:
    """The outputs of modules by name, in execution order; several outputs of a module are `name[0]`, ...

    Attributes:
        outputs: for each module, a CPU copy of its output per call.
    """

    def __init__(self) -> None:
        self.outputs: dict[str, list[Tensor]] = {}

    @contextmanager
    def watching(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Record inside the `with` block. The model itself, named "", is omitted because it returns the loss."""
        handles = [module.register_forward_hook(self._hook(name)) for name, module in modules if name]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # backward is running: activation checkpointing recomputes the module
            found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            for index, tensor in enumerate(found):
                key = f"{name}[{index}]" if len(found) > 1 else name
                self.outputs.setdefault(key, []).append(tensor.detach().cpu().clone())

        return record


@contextmanager
def gradient_order(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[list[str]]:
    """Names of parameters in the order in which backward inside the `with` block first gives them gradients."""
    order: dict[str, None] = {}

    def hook(name: str) -> Any:
        return lambda parameter: order.setdefault(name)

    handles = [it.register_post_accumulate_grad_hook(hook(name)) for name, it in parameters if it.requires_grad]
    names: list[str] = []
    try:
        yield names
    finally:
        names.extend(order)
        for handle in handles:
            handle.remove()


def spec_of(parameter: Tensor) -> ShardSpec:
    """The shard spec of a parameter, also if it is not sharded."""
    return get_shard_spec(parameter) or ShardSpec.whole(parameter.shape)
