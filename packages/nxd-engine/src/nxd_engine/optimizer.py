"""`NxDOptimizer`: an ordinary optimizer whose step reduces and clips gradients as the mesh requires."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from nxd_optim import (
    GradientReducer,
    LossScaler,
    MixedPrecision,
    NeuronZero1Optimizer,
    StochasticRounding,
    clip_grad_norm,
    reduce_sequence_parallel_gradients,
)
from nxd_optim.clip import GradientRange, checked_max_norm
from nxd_state import ParallelDegrees, is_lazy_device
from torch import Tensor
from torch.optim import Optimizer

from nxd_engine.config import complete_config, ensure_model_parallel
from nxd_engine.nxd_model import names_of, sync_gradients
from nxd_engine.rank_sync import run_or_raise_peer_error


def initialize_parallel_optimizer(
    nxd_config: Mapping[str, Any],
    optimizer_class: type[Optimizer],
    parameters: Iterable[Any],
    **defaults: Any,
) -> "NxDOptimizer":
    """Make an optimizer for a model of `initialize_parallel_model`. Called by all ranks.

    Args:
        nxd_config: the result of `neuronx_distributed_config`; it is checked again, so a script may change it.
        optimizer_class: a class such as `torch.optim.AdamW`; an elementwise one with ZeRO.
        parameters: this rank's parameters or parameter groups, in the same order on every replica.
        **defaults: keyword arguments of `optimizer_class`.

    Raises:
        ValueError: the config has mistakes or does not fit the mesh or the device, or the parameters differ between
            replicas.
        RuntimeError: the optimizer could not be made on another rank.
    """
    config = complete_config(nxd_config)
    ensure_model_parallel(ParallelDegrees.of_config(config))
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ValueError(f"optimizer_class={optimizer_class!r} must be a torch optimizer class, such as AdamW")
    options, precision = config["optimizer_config"], MixedPrecision(**config["mixed_precision_config"])
    for key in ("use_loss_scaling", "use_stochastic_rounding"):
        if getattr(precision, key) and is_lazy_device():
            raise ValueError(
                f"mixed_precision_config.{key}=True does not support XLA, where all steps and ranks share one graph; "
                "use bfloat16 weights with zero_one_enabled=True, which keeps master weights"
            )
    max_norm = float(options["max_grad_norm"]) if options["grad_clipping"] else None

    def make() -> Optimizer:
        groups = _listed(parameters)
        if not options["zero_stage"]:
            return optimizer_class(groups, **defaults)
        return NeuronZero1Optimizer(
            groups,
            optimizer_class,
            grad_clipping=max_norm is not None,
            max_norm=max_norm,
            lazy_init=True,
            shard_gradients=options["zero_stage"] >= 2,
            shard_group_size=options["shard_group_size"],
            offload=options["zero_offload"] is not None,
            **precision.zero1_arguments(_first_dtype(groups)),
            **defaults,
        )

    optimizer = run_or_raise_peer_error("making the optimizer", make)
    if isinstance(optimizer, NeuronZero1Optimizer):
        optimizer.init_zero()  # communicates, unlike the steps above, which may fail on one rank alone
    return NxDOptimizer(
        optimizer,
        config,
        max_norm=max_norm,
        loss_scaler=LossScaler() if precision.use_loss_scaling else None,
        rounding=_rounding(optimizer) if precision.use_stochastic_rounding else None,
    )


def _rounding(optimizer: Optimizer) -> StochasticRounding:
    return StochasticRounding(optimizer, names=names_of(_parameters_of(optimizer)))


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class NxDOptimizer(Optimizer):
    """An optimizer whose `step` also reduces and clips gradients.

    `step` does not send again the gradients that the model's `run_train` has averaged. A script that calls `backward`
    itself can overlap it with sending gradients by `overlap_backward`.

    Everything else belongs to the wrapped optimizer: schedulers change its `param_groups`, it calls the hooks, and it
    accepts the `state_dict`. A parameter without a gradient on any replica is also left unchanged.

    Attributes:
        optimizer: the wrapped optimizer; a `NeuronZero1Optimizer` with ZeRO.
        nxd_config: the complete config that it was made from.
        loss_scaler: scales the loss, and skips steps whose gradients overflow; None without loss scaling. A script
            that runs backward itself does so with `loss_scaler.scale(loss)`.
        num_steps: how often `step` was called.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        nxd_config: Mapping[str, Any],
        *,
        max_norm: float | None,
        loss_scaler: LossScaler | None = None,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: the optimizer; a `NeuronZero1Optimizer` reduces and clips gradients itself.
            nxd_config: the complete config.
            max_norm: maximum norm of the whole model's gradients; None for no clipping.
            loss_scaler: the loss scaler; None for no loss scaling.
            rounding: the stochastic rounding of `optimizer`; None to round to nearest.
        """
        # torch's __init__ is not called: it would make its own groups and state.
        self.optimizer = optimizer
        self.nxd_config = dict(nxd_config)
        self.loss_scaler, self._rounding = loss_scaler, rounding
        self.num_steps = 0
        self._max_norm = max_norm
        self._grad_norm: Tensor | None = None
        self._is_clipped = False  # from `clip_grad_norm` to `step`
        self._gradient_hooks: list[Callable[[Sequence[GradientRange]], None]] = []
        self._reducer = None if isinstance(optimizer, NeuronZero1Optimizer) else self._make_reducer()
        sync_gradients(self._parameters(), self)

    def __getstate__(self) -> dict[str, Any]:  # behind copies and pickles
        raise TypeError("an NxDOptimizer is bound to its parameters and ranks; copy its state_dict() instead")

    # Properties and not __getattr__: Lightning asks by a protocol, which from Python 3.12 on looks at the class alone.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's default settings."""
        return self.optimizer.defaults

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state, by parameter."""
        return self.optimizer.state

    def __getattr__(self, name: str) -> Any:  # hooks ...
        if name == "optimizer":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def grad_norm(self) -> Tensor | None:
        """The 2-norm of the last gradients before clipping, 0-d; None before the first ones or without clipping.

        It covers the whole model and is the same on every rank.
        """
        return getattr(self.optimizer, "grad_norm", self._grad_norm)

    def register_gradient_hook(self, hook: Callable[[Sequence[GradientRange]], None]) -> None:
        """Call `hook` in every step with this rank's complete gradients, before they are unscaled and clipped.

        They are means over the replicas; with ZeRO of this rank's parts. Every rank registers its hooks in the same
        order.
        """
        if isinstance(self.optimizer, NeuronZero1Optimizer):
            self.optimizer.register_gradient_hook(hook)
        else:
            self._gradient_hooks.append(hook)

    def scale_loss(self, **settings: Any) -> None:
        """Scale losses from now on by a `LossScaler` with these settings, as with `use_loss_scaling` in the config."""
        self.loss_scaler = LossScaler(**settings)

    def precision_state(self) -> dict[str, Any]:
        """Return the state of loss scaling and stochastic rounding; save it with a checkpoint, as `user_content`."""
        parts = {"loss_scaler": self.loss_scaler, "stochastic_rounding": self._rounding}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_precision_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `precision_state` returned; parts that this optimizer lacks are ignored."""
        if self.loss_scaler is not None and "loss_scaler" in state:
            self.loss_scaler.load_state_dict(state["loss_scaler"])
        if self._rounding is not None and "stochastic_rounding" in state:
            self._rounding.load_state_dict(state["stochastic_rounding"])

    @property
    def loss_scale(self) -> float:
        """The number that `run_train` multiplies losses by before backward; `step` divides the gradients by it."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale_factor

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Complete the gradients as `step` does, and scale them to a norm of the whole model of at most `max_norm`.

        For scripts and trainers that clip between backward and `step`, which then only updates::

            model.run_train(**batch)
            norm = optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()

        Called by all ranks, after the last backward of a step, with `grad_clipping=False` in the optimizer config. With
        loss scaling, gradients are divided by the scale first.

        Args:
            max_norm: maximum norm; inf to change no gradient.

        Returns:
            The norm before clipping, 0-d, the same on every rank; it is `grad_norm`, too.

        Raises:
            RuntimeError: the config has `grad_clipping`, or a second call before `step` or `zero_grad`.
            ValueError: `max_norm` is negative or not a number.
        """
        max_norm = checked_max_norm(max_norm)
        if self._max_norm is not None:
            raise RuntimeError(
                f"step() clips at optimizer_config.max_grad_norm={self._max_norm} already; read grad_norm after it, or "
                "set grad_clipping=False to call clip_grad_norm()"
            )
        self._refuse_if_clipped("clip_grad_norm()")
        if isinstance(self.optimizer, NeuronZero1Optimizer):
            with nullcontext() if self.loss_scaler is None else self.loss_scaler.applied_to(self.optimizer):
                self.optimizer.clip_grad_norm(max_norm)
        else:
            reducer = self._current_reducer()
            self._reduce_and_clip(reducer, max_norm)
            reducer.hold()
        self._is_clipped = True
        norm = self.grad_norm
        assert norm is not None
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average gradients over replicas, sum those of sequence-parallel regions, clip, update. Called by all ranks.

        After `clip_grad_norm` it only updates.

        With loss scaling, a step whose gradients overflow on any rank changes nothing, on all ranks.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: gradients are not finite at any loss scale, or a closure is given after `clip_grad_norm`.
        """
        loss = None
        if closure is not None:
            self._refuse_if_clipped("step(closure)")
        self.num_steps += 1
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._reducer is not None and not self._is_clipped:
            self._reduce_and_clip(self._current_reducer(), self._max_norm)
        if self.loss_scaler is None:
            self.optimizer.step()
        else:
            self.loss_scaler.step(self.optimizer)
        if self._is_clipped and self._reducer is not None:
            self._reducer.drop()
        self._is_clipped = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a new step without gradients, or with zeros; if all ranks call it, it drops a step that has failed."""
        if self._reducer is not None:
            self._reducer.drop()
        if self._is_clipped and self.loss_scaler is not None:
            self.loss_scaler.drop()
        self._is_clipped = False
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def overlap_backward(self) -> Iterator[None]:
        """Send each gradient as soon as the backward in the block has computed it. Wrap the last backward of a step.

        Only for scripts that call `backward` themselves; `run_train` does not need it.

        Raises:
            RuntimeError: gradients of this step were already sent, or a parameter gets a second one in the block.
        """
        with self._sender().last_backward(self._parameters()):
            yield
        self.synchronize()

    def backward_of(self, parameters: Sequence[Tensor], last: Sequence[Tensor]) -> AbstractContextManager[None]:
        """The block that `run_train` enters for a backward; the parameters may be others than this optimizer's.

        Args:
            parameters: those to whose gradients the backward adds. From ZeRO-2 on they are sent at once.
            last: those that get the last gradient of the run; with less sharding these are sent.
        """
        if isinstance(self.optimizer, NeuronZero1Optimizer) and self.optimizer.shard_gradients:
            return self.optimizer.each_backward(parameters)
        return self._sender().last_backward(last) if last else nullcontext()

    def synchronize(self) -> None:
        """Send the remaining gradients, and wait until all are averaged, as `run_train` does at its end."""
        self._sender().synchronize()

    def refresh_master_weights(self) -> None:
        """Set what is updated in place of the parameters from these, after they were loaded without the optimizer."""
        if isinstance(self.optimizer, NeuronZero1Optimizer):
            self.optimizer.refresh_master_weights()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's `state_dict` on this rank."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` from the same rank of the same layout."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings. Called by all ranks, not between `clip_grad_norm` and `step`."""
        self._refuse_if_clipped("add_param_group()")
        self.optimizer.add_param_group(param_group)
        if self._rounding is not None:  # ZeRO has further optimizers now
            state = self._rounding.state_dict()
            self._rounding.close()
            self._rounding = _rounding(self.optimizer)
            self._rounding.load_state_dict(state)
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = self._make_reducer()
        sync_gradients(self.param_groups[-1]["params"], self)

    def _parameters(self) -> list[Tensor]:
        return _parameters_of(self.optimizer)

    def _make_reducer(self) -> GradientReducer:
        return GradientReducer(self._parameters(), find_unused_parameters=True)

    def _sender(self) -> GradientReducer | NeuronZero1Optimizer:
        return self.optimizer if isinstance(self.optimizer, NeuronZero1Optimizer) else self._current_reducer()

    def _current_reducer(self) -> GradientReducer:
        """Return the reducer, or a new one if parameters train now that were frozen when it was made."""
        assert self._reducer is not None
        known = set(self._reducer.parameters)
        if any(parameter.requires_grad and parameter not in known for parameter in self._parameters()):
            self._reducer.close()
            self._reducer = self._make_reducer()
        return self._reducer

    def _refuse_if_clipped(self, call: str) -> None:
        if self._is_clipped:
            raise RuntimeError(
                f"{call} cannot be called now: this step's gradients have been clipped; call step() or zero_grad() "
                "of the optimizer first"
            )

    def _reduce_and_clip(self, reducer: GradientReducer, max_norm: float | None) -> None:
        """Complete the gradients of a step without ZeRO, and clip them unless `max_norm` is None."""
        reducer.finish()
        trained = [parameter for parameter in reducer.parameters if parameter.grad is not None]
        reduce_sequence_parallel_gradients(trained)
        for hook in self._gradient_hooks:
            hook([GradientRange(it, 0, it.numel(), it.grad) for it in trained if it.grad is not None])
        is_finite = self.loss_scaler is None or self.loss_scaler.unscale_(trained)
        self._grad_norm = None
        if max_norm is not None:
            self._grad_norm = clip_grad_norm(trained, max_norm) if is_finite else torch.tensor(math.inf)


def _listed(parameters: Iterable[Any]) -> list[Any]:
    """Return parameters or parameter groups as lists that can be read twice; the caller's groups are not changed."""

    def listed(group: Any) -> Any:
        if not isinstance(group, dict):
            return group
        if "params" not in group:
            raise ValueError(f"a parameter group has no 'params', only {', '.join(map(repr, group)) or 'nothing'}")
        inside = group["params"]
        return group | {"params": [inside] if isinstance(inside, Tensor) else list(inside)}

    return [listed(group) for group in parameters]


def _first_dtype(groups: Sequence[Any]) -> torch.dtype:
    """Return the first parameter's dtype; torch's default if all groups are empty, as on a stage that trains none."""
    if not groups:
        raise ValueError("no parameters are given; pass model.parameters(), or groups of them")
    inside = (it for group in groups for it in (group["params"] if isinstance(group, dict) else [group]))
    first = next(inside, None)
    if first is None:
        return torch.get_default_dtype()
    parameter: Tensor = first[1] if isinstance(first, tuple) else first
    return parameter.dtype
