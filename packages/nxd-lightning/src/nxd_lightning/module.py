"""`NeuronLTModule`: a LightningModule whose model, optimizer and scheduler follow an `nxd_config`.

Its steps run forward and backward of a batch through the model, with or without a pipeline. Scripts override any of
them.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Self

import torch
from nxd_engine import NxDModel, complete_config, initialize_parallel_model, initialize_parallel_optimizer
from nxd_state import broadcast, get_device, get_group, seed_model_parallel, widest_float
from torch import Tensor

from nxd_lightning.checkpoint_io import NeuronCheckpointIO
from nxd_lightning.lightning_package import fabric, lightning
from nxd_lightning.stage_outputs import output_of_last_stage


class GradientScale:
    """Scales the gradients that a backward pass adds, wherever in the pass the loss is computed.

    A pipeline computes the loss on its last stage and adds to the gradients itself, so no rank has a loss to divide.

    Args:
        parameters: trained parameters; their gradients are scaled before they are accumulated.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._divisor = 1
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._scaled)

    @contextmanager
    def divided_by(self, divisor: int) -> Iterator[None]:
        """Divide the gradients of backward passes inside the block."""
        self._divisor = divisor
        try:
            yield
        finally:
            self._divisor = 1

    def _scaled(self, gradient: Tensor) -> Tensor:
        return gradient if self._divisor == 1 else gradient / self._divisor


_LightningModule: Any = lightning().LightningModule
_reset_seed: Any = fabric("utilities.seed").reset_seed

DEFAULT_WEIGHT_DECAY = 0.01
TUTORIAL = "the page Train a Lightning module on two ranks shows how"


_ORDER_OF_SCRIPTS = (
    *("nxd_config", "opt_cls", "scheduler_cls", "model_args", "model_kwargs", "opt_args", "opt_kwargs"),
    *("scheduler_args", "scheduler_kwargs", "model_fn", "grad_accum_steps", "train_batch_size", "logging_interval"),
    *("log_rank0", "manual_opt"),
)


def _accept_order_of_scripts(init: Callable[..., None]) -> Callable[..., None]:
    """Let the config come first, as in existing scripts, and let modules with their own `setup` omit `model_fn`."""

    @wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], Mapping):
            args, kwargs = (), dict(zip(_ORDER_OF_SCRIPTS, args, strict=False)) | kwargs
        if not args:
            kwargs.setdefault("model_fn", None)
        if len(args) < 2 and "nxd_config" not in kwargs:
            raise TypeError(
                f"{type(self).__name__} has no nxd_config; a NeuronLTModule makes the model itself, so call "
                "super().__init__(model_fn, nxd_config, opt_cls) with the function that returns it "
                f"({TUTORIAL})"
            )
        init(self, *args, **kwargs)

    return call


class NeuronLTModule(_LightningModule):
    """A model trained with tensor, pipeline and data parallelism by a Trainer with `NeuronXLAStrategy`.

    A batch holds the model's inputs: a dict by their names, a tuple in their order, or one tensor. With a pipeline,
    losses that steps return and values that they log are those of the last stage, on every rank.

    Args:
        model_fn: function that returns the model. None, or omitted, if an overridden `setup` creates it.
        nxd_config: the result of `neuronx_distributed_config`, or a dict of its arguments.
        opt_cls: a torch optimizer class; None if `configure_optimizers` is overridden.
        scheduler_cls: a scheduler class, called with the optimizer and stepped with it; None for no scheduler.
        model_args: positional arguments of `model_fn`.
        model_kwargs: keyword arguments of `model_fn`.
        opt_args: positional arguments of `opt_cls`, after the parameters.
        opt_kwargs: keyword arguments of `opt_cls`.
        scheduler_args: positional arguments of `scheduler_cls`, after the optimizer.
        scheduler_kwargs: keyword arguments of `scheduler_cls`.
        grad_accum_steps: batches in an optimizer step.
        log_rank0: whether to log on rank 0 rather than on the last stage's first rank.
        manual_opt: whether `training_step` steps the optimizer itself; otherwise the Trainer does.
        train_batch_size: sequences in a batch, for scripts that compute their throughput.
        logging_interval: steps between log lines of a script.

    Attributes:
        model: the `NxDModel`, once `setup` has been called.
        averaged_loss: mean loss of the batches since the last optimizer step, as the sum of their shares.
        should_print: whether the last training step stepped the optimizer.
        loss, lr, input_ids, global_norm: values that scripts store here for their log.

    Raises:
        TypeError: there is no `nxd_config`.
        ValueError: the config has mistakes, or `grad_accum_steps` is not a positive integer.
    """

    model: NxDModel

    @_accept_order_of_scripts
    def __init__(
        self,
        model_fn: Callable[..., torch.nn.Module] | None,
        nxd_config: Mapping[str, Any],
        opt_cls: Callable[..., Any] | None = None,
        scheduler_cls: Callable[..., Any] | None = None,
        model_args: Sequence[Any] = (),
        model_kwargs: Mapping[str, Any] | None = None,
        opt_args: Sequence[Any] = (),
        opt_kwargs: Mapping[str, Any] | None = None,
        scheduler_args: Sequence[Any] = (),
        scheduler_kwargs: Mapping[str, Any] | None = None,
        grad_accum_steps: int = 1,
        log_rank0: bool = False,
        manual_opt: bool = True,
        *,
        train_batch_size: int = 16,
        logging_interval: int = 1,
    ) -> None:
        super().__init__()
        if type(grad_accum_steps) is not int or grad_accum_steps < 1:
            raise ValueError(f"grad_accum_steps={grad_accum_steps!r} must be an integer, 1 or more")
        self.model_fn = model_fn
        self.nxd_config = complete_config(nxd_config)
        self.opt_cls: Any = opt_cls
        self.scheduler_cls = scheduler_cls
        self.model_args = tuple(model_args)
        self.model_kwargs = dict(model_kwargs or {})
        self.opt_args = tuple(opt_args)
        self.opt_kwargs = dict(opt_kwargs or {})
        self.scheduler_args = tuple(scheduler_args)
        self.scheduler_kwargs = dict(scheduler_kwargs or {})
        self.grad_accum_steps = grad_accum_steps
        self.train_batch_size = train_batch_size
        self.logging_interval = logging_interval
        self.log_rank0 = log_rank0
        # The pipeline rank that logs; scripts that log themselves read it, or set it in setup.
        self.print_pp_rank = 0 if log_rank0 else int(self.nxd_config["pipeline_parallel_size"]) - 1
        self.automatic_optimization = not manual_opt
        self.averaged_loss = torch.zeros((), dtype=torch.float64)
        self.should_print = False
        self.loss: Any = None
        self.lr: Any = None
        self.input_ids: Any = None
        self.global_norm: Any = None
        self._gradient_scale: GradientScale | None = None

    # Model, optimizer and scheduler.

    def setup(self, stage: str | None = None) -> None:
        """Create the model, unless it exists already. Called by all ranks.

        With `seed_everything` its weights depend only on the seed, not on the layout or on earlier random numbers.

        Raises:
            RuntimeError: the Trainer has another strategy.
            ValueError: the model or the Trainer does not fit the config, or there is no `model_fn`.
        """
        if self._trainer is not None:
            self._check_trainer(self.trainer)
        if hasattr(self, "model"):
            return
        if self.model_fn is None:
            raise ValueError("model_fn is missing: pass the function that returns the model, or override setup")
        _reset_seed()
        seed = torch.initial_seed()
        self.model = initialize_parallel_model(self.nxd_config, self.model_fn, *self.model_args, **self.model_kwargs)
        seed_model_parallel(seed)

    def configure_optimizers(self) -> Any:
        """Return the optimizer of `get_param_groups_by_weight_decay`, and its scheduler.

        Raises:
            ValueError: there is no `opt_cls`.
        """
        if self.opt_cls is None:
            raise ValueError("opt_cls is missing: pass an optimizer class, or override configure_optimizers")
        names = list(inspect.signature(self.opt_cls).parameters)[1:]
        arguments = dict(zip(names, self.opt_args, strict=False)) | self.opt_kwargs
        groups = self.get_param_groups_by_weight_decay()
        optimizer = initialize_parallel_optimizer(self.nxd_config, self.opt_cls, groups, **arguments)
        optimizer.zero_grad()
        if self.scheduler_cls is None:
            return optimizer
        scheduler = self.scheduler_cls(optimizer, *self.scheduler_args, **self.scheduler_kwargs)
        name = f"lr-{type(optimizer.optimizer).__name__}"  # as LearningRateMonitor names it, which logs it once
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": name}]

    def get_param_groups_by_weight_decay(self) -> list[dict[str, Any]]:
        """Return parameter groups: matrices decay, biases and norms do not. May be overridden.

        The decay is that of `opt_kwargs`, or 0.01.
        """
        decay = self.opt_kwargs.get("weight_decay", DEFAULT_WEIGHT_DECAY)
        parameters = list(self.model.parameters())
        return [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]

    # Steps.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output; for models without pipeline stages."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Run forward and backward of a batch, and step the optimizer after `grad_accum_steps` of them.

        Logs `loss`, the mean over these batches and all replicas, when the optimizer is stepped.

        Returns:
            The batch's loss, 0-d, on every rank of the pipeline; backward has already run.
        """
        batches = self._batches_of_a_step
        self.should_print = (batch_idx + 1) % batches == 0 or self.trainer.is_last_batch
        shards_gradients = self.nxd_config["optimizer_config"]["zero_stage"] >= 2  # each batch's are averaged at once
        with nullcontext() if self.should_print or shards_gradients else self.model.no_sync():
            loss = self.train_on(batch, divide_gradients_by=batches)
        if not self.automatic_optimization:
            self.manual_backward(loss)  # only for callbacks and hooks around backward, which has already run
        dtype = widest_float(loss.device)
        self.averaged_loss = self.averaged_loss.to(loss.device, dtype) + loss.to(dtype) / batches
        if self.should_print:
            mean = self.trainer.strategy.reduce(self.averaged_loss)
            self.log("loss", mean, prog_bar=True, batch_size=1)
            self.averaged_loss = torch.zeros_like(self.averaged_loss)
            if not self.automatic_optimization:
                self._step_optimizer()
        return loss

    def train_on(self, batch: Any, *, divide_gradients_by: int = 1) -> Tensor:
        """Run forward and backward of a batch; gradients are added to the existing ones.

        Returns:
            The loss, 0-d, detached, on every rank of the pipeline.
        """
        if self._gradient_scale is None:
            self._gradient_scale = GradientScale(self.model.parameters())
        args, kwargs = _inputs(batch)
        with self._gradient_scale.divided_by(divide_gradients_by):
            loss = self.model.run_train(*args, **kwargs)
        return self.from_last_stage(torch.stack(loss).mean() if isinstance(loss, list) else loss)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log `val_loss`, the mean over batches and replicas."""
        return self._evaluate("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log `test_loss`, the mean over batches and replicas."""
        return self._evaluate("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the model's output for a batch without its `labels`; for a pipeline, a list with one per microbatch.

        The last stage's output is sent to the ranks of all stages. A pipeline whose `input_names` contain `labels`
        needs them, and returns the loss.
        """
        args, kwargs = _inputs(batch)
        stages = self.nxd_config["pipeline_parallel_size"]
        if stages == 1 or "labels" not in (self._input_names or ()):
            kwargs.pop("labels", None)
        output = self.model.run_eval(*args, **kwargs)
        if stages == 1 and isinstance(output, list) and len(output) == 1:
            return output[0]  # of the only microbatch
        return self.output_of_last_stage(output)

    # Steps that the Trainer would do in another order.

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward of a loss that has not been through it, scaled if the optimizer scales losses."""
        if loss.requires_grad:
            scaler = next((it.loss_scaler for it in self.trainer.strategy.optimizers if it.loss_scaler), None)
            (loss if scaler is None else scaler.scale(loss)).backward(*args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """The Trainer's step; gradients are dropped afterwards."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Do nothing: the Trainer calls it between `training_step` and backward, which are one step here."""

    # Values that only the last stage has.

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log as Lightning does; with a pipeline the last stage's value is used, and other stages may pass None.

        Call it on all ranks. `log_dict` does this for each of its values.
        """
        if not hasattr(value, "compute"):  # a torchmetrics metric exchanges its own state
            value = self.from_last_stage(value)
        super().log(name, value, *args, **kwargs)

    def from_last_stage(self, value: Any) -> Any:
        """Return the last stage's number on every rank of the pipeline. Called by all of them.

        Args:
            value: on the last stage a number or a one-element tensor; elsewhere anything, such as None. Without a
                pipeline it is returned.

        Returns:
            A 0-d tensor, float64, or float32 if the device has no float64.

        Raises:
            TypeError: the last stage has no number.
        """
        stages = get_group("pp")
        if stages.size == 1:
            return value
        is_last = stages.rank == stages.size - 1
        try:
            number = float(value) if is_last else 0.0
        except TypeError as error:
            raise TypeError(f"the last stage logs {value!r}, but the other stages expect a number") from error
        mine = torch.tensor(number, dtype=widest_float(get_device()), device=get_device())
        return broadcast(mine, stages, source=stages.size - 1)

    output_of_last_stage = staticmethod(output_of_last_stage)

    # Checkpoints outside of a Trainer.

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | os.PathLike[str], *, strict: bool = True, **arguments: Any
    ) -> Self:
        """Return a module whose model is filled from a checkpoint of any layout. Called by all ranks.

        Args:
            checkpoint_path: a folder written by a Trainer or `nxd.save_checkpoint`.
            strict: whether the checkpoint's model must have the same names as this one.
            **arguments: arguments of this class; those stored by `save_hyperparameters` may be omitted.

        Raises:
            CheckpointError: on all ranks: there is no checkpoint, or it does not fit.
        """
        io = NeuronCheckpointIO()
        kept = io.load_checkpoint(checkpoint_path).get("hyper_parameters", {})
        module = cls(**{**kept, **arguments})
        module.setup()
        io.fill(checkpoint_path, module.model, strict=strict)
        return module

    @property
    def _input_names(self) -> Sequence[str] | None:
        names: Sequence[str] | None = (self.nxd_config["pipeline_config"] or {}).get("input_names")
        return names

    @property
    def _batches_of_a_step(self) -> int:
        if self.automatic_optimization:
            return int(self.trainer.accumulate_grad_batches)
        return self.grad_accum_steps

    def _step_optimizer(self) -> None:
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        schedulers = self.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()

    def _evaluate(self, name: str, batch: Any) -> Tensor:
        args, kwargs = _inputs(batch)
        loss: Tensor = self.from_last_stage(self.model.run_eval(*args, **kwargs))
        self.log(name, loss, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=_batch_size(batch))
        return loss

    def _check_trainer(self, trainer: Any) -> None:
        if getattr(trainer.strategy, "strategy_name", "") != "nxd":
            raise RuntimeError(
                f"NeuronLTModule runs on a mesh, which {type(trainer.strategy).__name__} does not support; create the "
                "Trainer with strategy=NeuronXLAStrategy(nxd_config)"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if self.nxd_config[name] != getattr(trainer.strategy, name):
                raise ValueError(
                    f"the module's nxd_config has {name}={self.nxd_config[name]}, but its strategy has "
                    f"{getattr(trainer.strategy, name)}; pass both the same nxd_config"
                )
        if self.automatic_optimization and self.grad_accum_steps > 1:
            if trainer.accumulate_grad_batches not in (1, self.grad_accum_steps):
                raise ValueError(
                    f"grad_accum_steps={self.grad_accum_steps}, but the Trainer has "
                    f"accumulate_grad_batches={trainer.accumulate_grad_batches}; set only one of them"
                )
            trainer.accumulate_grad_batches = self.grad_accum_steps


def _inputs(batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return a batch as arguments, by position and by name; a named tuple has names."""
    if hasattr(batch, "_asdict"):
        batch = batch._asdict()
    if isinstance(batch, Mapping):
        return [], dict(batch)
    return (list(batch), {}) if isinstance(batch, list | tuple) else ([batch], {})


def _batch_size(batch: Any) -> int:
    args, kwargs = _inputs(batch)
    return next((value.shape[0] for value in _tensors([*args, *kwargs.values()])), 1)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor) and value.dim())
