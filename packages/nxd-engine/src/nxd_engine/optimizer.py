"""`NxDOptimizer`: an ordinary optimizer whose step reduces and clips gradients as the mesh requires."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from nxd_optim import (
    GradientReducer,
    MixedPrecision,
    NeuronZero1Optimizer,
    clip_grad_norm,
    reduce_sequence_parallel_gradients,
)
from nxd_state import ParallelDegrees
from torch import Tensor
from torch.optim import Optimizer

from nxd_engine.config import complete_config, ensure_model_parallel
from nxd_engine.model import sync_gradients
from nxd_engine.rank_sync import together


def initialize_parallel_optimizer(
    nxd_config: Mapping[str, Any],
    optimizer_class: type[Optimizer],
    parameters: Iterable[Any],
    **defaults: Any,
) -> "NxDOptimizer":
    """Make an optimizer for a model of `initialize_parallel_model`. Called by all ranks.

    Args:
        nxd_config: of `neuronx_distributed_config`. It may have been changed since; it is checked again.
        optimizer_class: such as `torch.optim.AdamW`; with ZeRO-1 an elementwise one.
        parameters: of this rank, or groups of them, as for any torch optimizer; in the same order on every replica.
        **defaults: for `optimizer_class`.

    Raises:
        ValueError: the config has mistakes or does not fit the mesh, or the parameters differ between replicas.
        RuntimeError: the optimizer could not be made on another rank.
    """
    config = complete_config(nxd_config)
    ensure_model_parallel(ParallelDegrees.of_config(config))
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ValueError(f"optimizer_class={optimizer_class!r} must be a class of torch optimizers, such as AdamW")
    options = config["optimizer_config"]
    max_norm = float(options["max_grad_norm"]) if options["grad_clipping"] else None

    def make() -> Optimizer:
        groups = _listed(parameters)
        if not options["zero_one_enabled"]:
            return optimizer_class(groups, **defaults)
        precision = MixedPrecision(**config["mixed_precision_config"])
        return NeuronZero1Optimizer(
            groups,
            optimizer_class,
            grad_clipping=max_norm is not None,
            max_norm=max_norm,
            lazy_init=True,
            **precision.zero1_arguments(_first_dtype(groups)),
            **defaults,
        )

    optimizer = together("make its optimizer", make)
    if isinstance(optimizer, NeuronZero1Optimizer):
        optimizer.init_zero()  # communicates, unlike what a rank may be alone in failing at
    return NxDOptimizer(optimizer, config, max_norm=max_norm)


class NxDOptimizer(Optimizer):
    """An optimizer with the gradients' reductions and clipping in its `step`.

    `step` does not send gradients again that `run_train` of the model has averaged. A script that calls `backward`
    itself can overlap it with sending gradients by `overlap_backward`.

    All else is the wrapped optimizer's: schedulers change its `param_groups`, hooks are called by it, and a
    `state_dict` fits it. As there, a parameter without a gradient on any replica is left alone.

    Attributes:
        optimizer: the wrapped one; a `NeuronZero1Optimizer` with ZeRO-1.
        nxd_config: the complete config that it was made from.
    """

    def __init__(self, optimizer: Optimizer, nxd_config: Mapping[str, Any], *, max_norm: float | None) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: reduces and clips itself if it is a `NeuronZero1Optimizer`.
            nxd_config: the complete config.
            max_norm: of the whole model's gradients; None not to clip.
        """
        # Not torch's __init__, which would make groups and state of its own.
        self.optimizer = optimizer
        self.nxd_config = dict(nxd_config)
        self._max_norm = max_norm
        self._grad_norm: Tensor | None = None
        self._reducer = None if isinstance(optimizer, NeuronZero1Optimizer) else self._make_reducer()
        sync_gradients(self._parameters(), self)

    def __getstate__(self) -> dict[str, Any]:  # behind copies and pickles
        raise TypeError("an NxDOptimizer is bound to its parameters and its ranks; keep its state_dict() instead")

    def __getattr__(self, name: str) -> Any:  # param_groups, state, defaults, hooks ...
        if name == "optimizer":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def grad_norm(self) -> Tensor | None:
        """The 2-norm of the last step's gradients before clipping, 0-d; None before the first step or without clipping.

        It counts the whole model once and is the same on every rank.
        """
        return getattr(self.optimizer, "grad_norm", self._grad_norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average gradients over the replicas, sum those of sequence-parallel regions, clip, update. On all ranks.

        Args:
            closure: computes loss and gradients; called once.

        Returns:
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._reducer is not None:
            self._reduce_and_clip()
        self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a new step without gradients, or with zeros; drops a step whose backward failed, if all ranks do so."""
        if self._reducer is not None:
            self._reducer.drop()
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Send gradients as soon as the backward in the block has made them. Use it around the last backward of a step.

        Only for scripts that call `backward` themselves; `run_train` needs none.

        Raises:
            RuntimeError: gradients of this step have left already, or a parameter gets a second one in the block.
        """
        with self.last_backward(self._parameters()):
            yield
        self.synchronize()

    @contextmanager
    def last_backward(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """What `run_train` enters for the last backward of some parameters, which need not be this optimizer's."""
        with self._sender().last_backward(parameters):
            yield

    def synchronize(self) -> None:
        """Send the remaining gradients, and wait until all are averaged, as `run_train` does at its end."""
        self._sender().synchronize()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, of this rank."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on the same rank of the same layout."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; on all ranks."""
        self.optimizer.add_param_group(param_group)
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = self._make_reducer()
        sync_gradients(self.param_groups[-1]["params"], self)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _make_reducer(self) -> GradientReducer:
        return GradientReducer(self._parameters(), find_unused_parameters=True)

    def _sender(self) -> GradientReducer | NeuronZero1Optimizer:
        return self.optimizer if isinstance(self.optimizer, NeuronZero1Optimizer) else self._current_reducer()

    def _current_reducer(self) -> GradientReducer:
        """A new one if parameters are trained that were frozen when it was made."""
        assert self._reducer is not None
        known = set(self._reducer.parameters)
        if any(parameter.requires_grad and parameter not in known for parameter in self._parameters()):
            self._reducer.close()
            self._reducer = self._make_reducer()
        return self._reducer

    def _reduce_and_clip(self) -> None:
        reducer = self._current_reducer()
        reducer.finish()
        trained = [parameter for parameter in reducer.parameters if parameter.grad is not None]
        reduce_sequence_parallel_gradients(trained)
        if self._max_norm is not None:
            self._grad_norm = clip_grad_norm(trained, self._max_norm)


def _listed(parameters: Iterable[Any]) -> list[Any]:
    """Parameters or groups of them as lists that may be read twice; the caller's groups are left alone."""

    def listed(group: Any) -> Any:
        if not isinstance(group, dict):
            return group
        if "params" not in group:
            raise ValueError(f"a parameter group has no 'params', only {', '.join(map(repr, group)) or 'nothing'}")
        inside = group["params"]
        return group | {"params": [inside] if isinstance(inside, Tensor) else list(inside)}

    return [listed(group) for group in parameters]


def _first_dtype(groups: Sequence[Any]) -> torch.dtype:
    """Of the first parameter, torch's default if all groups are empty, as on a stage without trained parameters."""
    if not groups:
        raise ValueError("no parameters are given; pass model.parameters(), or groups of them")
    inside = (it for group in groups for it in (group["params"] if isinstance(group, dict) else [group]))
    first = next(inside, None)
    if first is None:
        return torch.get_default_dtype()
    parameter: Tensor = first[1] if isinstance(first, tuple) else first
    return parameter.dtype
