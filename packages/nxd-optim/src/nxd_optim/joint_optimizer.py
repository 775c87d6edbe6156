"""`JointOptimizer`: what optimizers have in common that update matrices of which ranks hold parts.

Before such an optimizer steps, the ranks that hold parts of the same matrices compute together what it needs of the
whole ones. `NeuronZero1Optimizer`, whose buckets have an optimizer each, does so once for all of them.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from nxd_state import Group
from nxd_state.parameter_marks import is_expert
from torch.optim import Optimizer

from nxd_optim.updated_parts import UpdatedParts, UpdatedRange


class JointStep(Protocol):
    """What several optimizers, each of which updates one of some parts, do before their steps."""

    def prepare(self, optimizers: Sequence[Any], used: Set[int], param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Compute together what the steps need. Called by all ranks.

        Args:
            optimizers: the optimizers of the parts. The weights of used parameters have their gradients.
            used: ids of the parameters to update, the same ones on all ranks that hold parts of them.
            param_groups: the groups of the parameters, with their settings.
        """


class JointOptimizer(Optimizer):
    """An optimizer with a `joint_step`, which the step of one that updates whole parameters itself begins with."""

    _joint_step: JointStep | None = None  # of the model's own parameters
    _is_prepared = False  # by a joint step

    @classmethod
    def joint_step(cls, parts: Sequence[UpdatedParts]) -> JointStep:
        """Return what several optimizers of this class, each of which updates one of the parts, do before their steps.

        `check_elementwise` accepts a class with this method: it is exact although it is given parts of matrices.
        """
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore states and groups, which get the defaults that they lack."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings."""
        super().add_param_group(param_group)
        self._joint_step = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients. Called by all ranks that hold parts of the same ones.

        Returns:
            The result of `closure`.

        Raises:
            RuntimeError: gradients are sparse or complex.
            ValueError: on the first step: the ranks hold other parts than their shard specs say, or a parameter that
                must be a matrix is none.
            NotImplementedError: Adafactor's parameters are split over ranks, on XLA.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        self._update()
        return loss

    def _update(self) -> None:
        """Update the weights, after a joint step."""
        raise NotImplementedError

    def _own_ranges(self) -> list[UpdatedRange]:
        """Return the model's own parameters, whole, that a joint step is for."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Take the joint step of the model's own parameters, unless one of parts has been taken."""
        if not self._is_prepared:
            ranges = self._own_ranges()
            if self._joint_step is None:
                alone = Group.solo("dp")
                dense = [it for it in ranges if not is_expert(it.parameter)]
                experts = [it for it in ranges if is_expert(it.parameter)]
                self._joint_step = self.joint_step(
                    [UpdatedParts([it.parameter for it in own], own, alone) for own in (dense, experts)]
                )
            used = {id(it.parameter) for it in ranges if it.weight.grad is not None}
            self._joint_step.prepare([self] * 2, used, self.param_groups)
        self._is_prepared = False
