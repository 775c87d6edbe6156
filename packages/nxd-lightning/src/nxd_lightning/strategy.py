"""`NeuronXLAStrategy`: assigns a Trainer's processes to ranks of the mesh, and implements their joint operations."""

import os
import signal
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from nxd_engine import complete_config, ensure_model_parallel
from nxd_state import (
    ParallelDegrees,
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    get_device,
    get_group,
    get_mesh,
    get_world_group,
    is_cpu,
    model_parallel_is_initialized,
)
from nxd_state.degrees import SIZES
from torch import Tensor

from nxd_lightning.checkpoint_io import NeuronCheckpointIO
from nxd_lightning.checks import (
    ENOUGH_BATCHES,
    check_model,
    check_optimizers,
    check_trainer,
    refuse_if_nothing_stepped,
    warn_if_nothing_stepped,
)
from nxd_lightning.lightning_package import (
    ON_XLA,
    SPELLING,
    CheckpointIOBase,
    NeuronXLAAccelerator,
    RankLauncher,
    StrategyBase,
    advice,
    fabric,
    lightning,
)
from nxd_lightning.precision import let_optimizer_scale

_TrainerFn: Any = lightning("trainer.states").TrainerFn
_rank_zero_only: Any = lightning("utilities.rank_zero").rank_zero_only
_reset_seed: Any = fabric("utilities.seed").reset_seed

REDUCTIONS: dict[str, Any] = {"mean": "avg", "avg": "avg", "sum": "sum", "max": "max", "min": "min"}


class NeuronXLAStrategy(StrategyBase):
    """Runs a `NeuronLTModule` on a mesh of tensor-, pipeline- and data-parallel ranks.

    Inherits Lightning's `XLAStrategy` on torch-xla and its `DDPStrategy` on CPU and CUDA, with gloo or nccl.

    Args:
        nxd_config: the result of `neuronx_distributed_config`, or a dict of its arguments.
        tensor_parallel_size: ranks that split each layer, without `nxd_config`.
        pipeline_parallel_size: number of pipeline stages, without `nxd_config`.
        save_load_xser: passed on to the checkpoints; both forms are the same here.
        accelerator: as for any Lightning strategy.
        parallel_devices: a device for each rank of this host; by default the Trainer's `devices`, or torchrun's ranks.
        cluster_environment: source of this process's rank; chosen by Lightning if None.
        checkpoint_io: a `NeuronCheckpointIO`.
        precision_plugin: a plugin such as `NeuronXLAPrecisionPlugin`.
        context_parallel_size: ranks that split each sequence, without `nxd_config`.
        expert_parallel_size: ranks that split the experts, without `nxd_config`.
        debug: accepted without effect.
        sync_module_states: accepted without effect; replicas begin with the same weights.

    Raises:
        ValueError: the config has mistakes, degrees are given twice, or `checkpoint_io` is of another class.
    """

    strategy_name = "nxd"
    cluster_environment: Any
    _checkpoint_io: Any

    def __init__(
        self,
        nxd_config: Mapping[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        save_load_xser: bool = True,
        *,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        debug: bool = False,
        sync_module_states: bool = False,
    ) -> None:
        given = (tensor_parallel_size, pipeline_parallel_size, context_parallel_size, expert_parallel_size)
        self._degrees = _degrees(nxd_config, dict(zip(SIZES, given, strict=True)))
        self.save_load_xser = save_load_xser
        self._loaded_from: str | None = None
        self._exception_is_known = False
        super().__init__(
            accelerator=NeuronXLAAccelerator() if ON_XLA and accelerator is None else accelerator,
            parallel_devices=parallel_devices or _devices_of_launched_ranks(),
            precision_plugin=precision_plugin,
        )
        self.checkpoint_io = checkpoint_io
        self.cluster_environment = cluster_environment

    def __repr__(self) -> str:
        # Lightning shows this when it refuses a strategy that belongs to its other package.
        return f"<NeuronXLAStrategy for a Trainer of {SPELLING} ({advice()})>"

    # This process's ranks.

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that split each layer."""
        return self._degrees.tp

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of ranks that the layers are distributed over."""
        return self._degrees.pp

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas, each with its own data."""
        if model_parallel_is_initialized():
            return get_group("dp").size
        return int(self.world_size // self._degrees.model_ranks)

    @property
    def tensor_parallel_rank(self) -> int:
        """The rank in the tensor-parallel group."""
        return get_group("tp").rank

    @property
    def pipeline_parallel_rank(self) -> int:
        """The rank in the pipeline-parallel group."""
        return get_group("pp").rank

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's replica."""
        return get_group("dp").rank

    @property
    def logging_rank(self) -> int:
        """The rank that shows progress and writes TensorBoard: one of the last stage, or rank 0 with `log_rank0`."""
        mesh = get_mesh()
        log_rank0 = getattr(self.lightning_module, "log_rank0", False)
        return 0 if log_rank0 else mesh.rank_at(pp=mesh.pp - 1)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of samplers, which divide data among replicas; ranks of one replica get the same data."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def set_world_ranks(self) -> None:
        """Set this process's ranks in the cluster environment, if it does not know them itself."""
        if self.cluster_environment is None:
            return
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _rank_zero_only.rank = self.global_rank

    # Setup and teardown.

    def _configure_launcher(self) -> None:
        self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Create the mesh, or check the existing one. Called by all ranks.

        Raises:
            ValueError: the degrees do not fit the ranks, or the Trainer would clip gradients.
            RuntimeError: the Trainer has other ranks or another device than exist.
            TypeError: a callback or logger belongs to the other Lightning package, or the module is not a
                `NeuronLTModule`.
        """
        self._exception_is_known = False
        _reset_seed()
        self.set_world_ranks()
        ensure_model_parallel(self._degrees)
        world = get_world_group()
        if world.size != self.world_size:
            raise RuntimeError(
                f"the Trainer is set up for {self.world_size} ranks, but {world.size} are running; give it "
                f"devices={world.size} (ranks on this host), and num_nodes if there are several hosts"
            )
        if self.root_device.type != get_device().type:
            raise RuntimeError(
                f"the Trainer computes on {self.root_device.type}, but nxd on {get_device().type}; give it "
                f'accelerator="{get_device().type}", or set NXD_DEVICE={self.root_device.type}'
            )
        _rank_zero_only.rank = world.rank
        check_trainer(self.lightning_module.trainer)
        for logger in self.lightning_module.trainer.loggers:
            if hasattr(logger, "choose_writer"):
                writer = 0 if getattr(logger, "log_rank0", False) else self.logging_rank
                logger.choose_writer(is_writer=world.rank == writer, broadcast=self.broadcast)

    def setup(self, trainer: Any) -> None:
        """Move the module to its device and create optimizers. Called by all ranks.

        Raises:
            TypeError: the module's model is not split over the ranks.
            ValueError: there are several optimizers, one is not made for the mesh, or the loss would be scaled on XLA.
        """
        check_model(trainer.lightning_module)
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == _TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
            let_optimizer_scale(self.precision_plugin, self.optimizers)
        self.setup_precision_plugin()

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader unchanged: batches are moved one by one, or not at all."""
        return dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to this rank's device; with a pipeline it stays on the CPU until a stage needs it."""
        if self.pipeline_parallel_size > 1:
            device = torch.device("cpu")
        return super().batch_to_device(batch, device, dataloader_idx)

    def configure_ddp(self) -> None:
        """Do nothing: the optimizer averages gradients over the replicas."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Notice a `training_step` that never steps the optimizer: warn early, and refuse a second epoch.

        Raises:
            RuntimeError: a whole epoch has changed nothing.
        """
        module = self.lightning_module
        if batch_idx == ENOUGH_BATCHES * module.grad_accum_steps:
            warn_if_nothing_stepped(module, batches=batch_idx)
        if batch_idx == 0:
            refuse_if_nothing_stepped(module, batches=module.trainer.fit_loop.total_batch_idx)

    def on_train_end(self) -> None:
        """Warn after a run in which nothing stepped the optimizer."""
        warn_if_nothing_stepped(
            self.lightning_module, batches=self.lightning_module.trainer.fit_loop.total_batch_idx + 1
        )

    def on_exception(self, exception: BaseException) -> None:
        """Kill the ranks that this process started; they may be waiting for it."""
        self._exception_is_known = True
        self.launcher.kill(signal.SIGKILL)

    def teardown(self) -> None:
        """End the Trainer's run. The model and the mesh stay for the rest of the script."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.cluster_environment.teardown()
        self.checkpoint_io.teardown()

    # Collective operations.

    @property
    def is_left_alone(self) -> bool:
        """Whether callbacks are handling an exception that other ranks may not have, so that no rank must wait."""
        is_ending = getattr(getattr(self.lightning_module, "_trainer", None), "interrupted", False)
        return self.world_size > 1 and is_ending and not self._exception_is_known

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; not while `is_left_alone`."""
        if model_parallel_is_initialized() and not self.is_left_alone:
            barrier(get_world_group())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one rank's value on all ranks; this rank's own while `is_left_alone`."""
        if not model_parallel_is_initialized() or self.is_left_alone:
            return obj
        return all_gather_object(obj, get_world_group())[src]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor's mean, sum, maximum or minimum over ranks; this rank's own while `is_left_alone`.

        Args:
            tensor: the tensor; other values are returned unchanged.
            group: a torch process group; None for all ranks.
            reduce_op: "mean", "sum", "max" or "min", or torch's equivalent.

        Raises:
            ValueError: the reduction is unknown.
        """
        if not isinstance(tensor, Tensor) or self.is_left_alone:
            return tensor
        if group is not None and group != torch.distributed.group.WORLD:
            return super().reduce(tensor, group, reduce_op)
        op = next((op for name, op in REDUCTIONS.items() if name in str(reduce_op).lower()), None)
        if op is None:
            raise ValueError(f"unknown reduce_op={reduce_op!r}; use one of {', '.join(REDUCTIONS)}")
        if op == "avg" and not tensor.is_floating_point():
            tensor = tensor.float()
        return all_reduce(tensor.to(get_device()), get_world_group(), op=op).to(tensor.device)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all ranks along a new first dim; with one rank, return the tensor unchanged."""
        if get_world_group().size == 1:
            return tensor
        if sync_grads or (group is not None and group != torch.distributed.group.WORLD):
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)
            return gathered
        return all_gather(tensor.to(get_device())[None], get_world_group()).to(tensor.device)

    # Checkpoints: every rank writes and reads its own part.

    @property
    def checkpoint_io(self) -> Any:
        """The object that reads and writes checkpoints."""
        if self._checkpoint_io is None:
            self._checkpoint_io = NeuronCheckpointIO(self.save_load_xser)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIOBase) -> None:
        if io is not None and not isinstance(io, NeuronCheckpointIO):
            raise ValueError(
                f"checkpoint_io is a {type(io).__name__}, which would save one rank's part; use NeuronCheckpointIO"
            )
        self._checkpoint_io = io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: model and optimizer are loaded together, once both exist."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state except its model, such as metrics; `save_checkpoint` saves the model."""
        state: dict[str, Any] = self.lightning_module.state_dict(keep_vars=True)
        others = {name: value for name, value in state.items() if not name.startswith("model.")}
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in others.items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of loss scaling and rounding; `save_checkpoint` saves the optimizer."""
        state: dict[str, Any] = optimizer.precision_state()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint to the first rank's path, except while `is_left_alone`. Called by all ranks.

        Raises:
            ValueError: `storage_options` are given.
        """
        if self.is_left_alone:
            warnings.warn(f"{filepath} is not written: that needs all ranks, and this one has failed", stacklevel=2)
            return
        if storage_options is not None:
            raise ValueError("NeuronXLAStrategy does not support storage_options; pass save_checkpoint only the path")
        subjects: dict[str, Any] = {"model": self.lightning_module.model}
        if "optimizer_states" in checkpoint:
            subjects |= self._fitted()
        path = self.broadcast(os.fspath(filepath))
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=subjects)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> Any:
        """Return Lightning's state in a checkpoint; model and optimizer are loaded later. Called by all ranks."""
        self._loaded_from = self.broadcast(os.fspath(checkpoint_path))
        return self.checkpoint_io.load_checkpoint(self._loaded_from)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model, and its optimizer when fitting, from the last checkpoint. Called by all ranks."""
        is_fitting = self.lightning_module.trainer.state.fn == _TrainerFn.FITTING
        subjects = self._fitted() if is_fitting and "optimizer_states" in checkpoint else {}
        if "loops" in checkpoint:
            subjects.pop("scheduler", None)  # Lightning loads all schedulers
        self.checkpoint_io.fill(self._loaded_from, self.lightning_module.model, strict=strict, **subjects)
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore loss scaling and rounding; `load_model_state_dict` loads the optimizer."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_precision_state(state)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def _fitted(self) -> dict[str, Any]:
        """Return the optimizer and the first scheduler, if they exist."""
        subjects: dict[str, Any] = {"optimizer": self.optimizers[0]} if self.optimizers else {}
        if self.lr_scheduler_configs:
            subjects["scheduler"] = self.lr_scheduler_configs[0].scheduler
        return subjects


def _degrees(config: Mapping[str, Any] | None, given: Mapping[str, Any]) -> ParallelDegrees:
    """Return the degrees of a config, or without one the degrees `given` by axis."""
    if config is None:
        for axis, size in given.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"{SIZES[axis]}={size!r} must be an integer, 1 or more")
        return ParallelDegrees(**given)
    degrees = ParallelDegrees.of_config(complete_config(config))
    twice = [f"{SIZES[axis]}={size}" for axis, size in given.items() if size not in (1, getattr(degrees, axis))]
    if twice:
        raise ValueError(f"{', '.join(twice)} differs from nxd_config; set the degrees in nxd_config only")
    return degrees


def _devices_of_launched_ranks() -> list[torch.device] | None:
    """Return a device for each rank that torchrun started on this host, so that the Trainer need not be told."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    device = get_device()
    return [device if is_cpu(device) else torch.device(device.type, index) for index in range(count)] or None
