"""Hooks that scripts register for later, and the ZeRO-1 of experts under its own name."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from nxd_optim import NeuronZero1Optimizer
from torch import nn
from torch.optim import Optimizer


class PostPartitionHooks:
    """Functions that a script registers to be called once, when its model is cut into stages."""

    def __init__(self) -> None:
        self.hooks: list[dict[str, Any]] = []

    def register_post_partition_hook(
        self,
        callable_function: Callable[..., Any],
        func_args: Iterable[Any] = (),
        func_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Register a function with its arguments; `filter_to_local_parameter_group` is given the model as well.

        Raises:
            ValueError: it is not callable.
        """
        if not callable(callable_function):
            raise ValueError(f"callable_function={callable_function!r} must be callable; pass a function")
        function = partial(callable_function, *func_args, **(func_kwargs or {}))
        self.hooks.append({"function": function, "name": callable_function.__name__})

    def execute_all_hooks(self, model: nn.Module | None = None) -> list[Any]:
        """Call all functions once, in their order, and forget them; returns their results.

        Raises:
            ValueError: a hook needs the model, but none was passed.
        """
        needs_model = filter_to_local_parameter_group.__name__
        if model is None and any(hook["name"] == needs_model for hook in self.hooks):
            raise ValueError(f"the hook {needs_model} needs the model; call execute_all_hooks(model)")
        hooks, self.hooks = self.hooks, []
        return [it["function"](**({"model": model} if it["name"] == needs_model else {})) for it in hooks]


def filter_to_local_parameter_group(optimizer: Optimizer, model: nn.Module) -> None:
    """Leave an optimizer only the parameters that this rank's part of the model has.

    Args:
        optimizer: optimizer whose groups are changed.
        model: a model, of which this rank may have some stages only.
    """
    local = set(model.parameters())
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in local]


class NeuronEPZero1Optimizer(NeuronZero1Optimizer):
    """The same: ZeRO-1 knows the replicas of each parameter, an expert's among them."""
