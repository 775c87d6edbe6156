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
    is_host,
    model_parallel_is_initialized,
)
from nxd_state.degrees import SIZES
from torch import Tensor

from nxd_lightning.checkpoint_io import NeuronCheckpointIO
from nxd_lightning.checks import check_optimizers, check_trainer
from nxd_lightning.launcher import RankLauncher
from nxd_lightning.lightning_package import (
    ON_XLA,
    SPELLING,
    CheckpointIOBase,
    NeuronXLAAccelerator,
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
        # Lightning shows it where it refuses a strategy, which it does to those of the other spelling.
        return f"<NeuronXLAStrategy for a Trainer of {SPELLING} ({advice()})>"

    # This process's ranks.

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that split each layer."""
        return self._degrees.tp

    @property
    def pipeline_parallel_size(self) -> int:
        """Ranks that the layers are distributed over."""
        return self._degrees.pp

    @property
    def data_parallel_size(self) -> int:
        """Replicas, each with data of its own."""
        if model_parallel_is_initialized():
            return get_group("dp").size
        return int(self.world_size // self._degrees.model_ranks)

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of each layer this rank has."""
        return get_group("tp").rank

    @property
    def pipeline_parallel_rank(self) -> int:
        """This rank's place in its pipeline."""
        return get_group("pp").rank

    @property
    def data_parallel_rank(self) -> int:
        """Which replica this rank is of."""
        return get_group("dp").rank

    @property
    def logging_rank(self) -> int:
        """The rank that shows progress and writes TensorBoard: of the last stage, or 0 with `log_rank0`."""
        mesh = get_mesh()
        log_rank0 = getattr(self.lightning_module, "log_rank0", False)
        return 0 if log_rank0 else mesh.rank_at(pp=mesh.pp - 1)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Samplers divide data among replicas; ranks of one replica see the same."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def set_world_ranks(self) -> None:
        """Set this process's ranks in the environment, where it does not know them by itself."""
        if self.cluster_environment is None:
            return
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _rank_zero_only.rank = self.global_rank

    # From the Trainer's start to its end.

    def _configure_launcher(self) -> None:
        self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Make the mesh, or check the one there is. Called by all ranks.

        Raises:
            ValueError: the degrees do not fit the ranks.
            RuntimeError: the Trainer was given other ranks or another device than exist.
            TypeError: a callback or a logger is of the other spelling of Lightning, or the module no `NeuronLTModule`.
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
        """Put the module on its device and make optimizers. Called by all ranks.

        Raises:
            ValueError: there are several optimizers, or one that is not made for the mesh, or the loss is to be scaled
                on XLA.
        """
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == _TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
            let_optimizer_scale(self.precision_plugin, self.optimizers)
        self.setup_precision_plugin()

    def process_dataloader(self, dataloader: object) -> object:
        """Returns the loader unchanged: batches are moved one by one, or not at all."""
        return dataloader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The batch on this rank's device; with a pipeline on the CPU, from where each stage takes what it needs."""
        if self.pipeline_parallel_size > 1:
            device = torch.device("cpu")
        return super().batch_to_device(batch, device, dataloader_idx)

    def configure_ddp(self) -> None:
        """Nothing is wrapped: the optimizer averages gradients over the replicas."""

    def on_exception(self, exception: BaseException) -> None:
        """End the ranks that this process has started; they may be waiting for it."""
        self._exception_is_known = True
        self.launcher.kill(signal.SIGKILL)

    def teardown(self) -> None:
        """End the Trainer's run. Model and mesh stay, for what the script does next."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.cluster_environment.teardown()
        self.checkpoint_io.teardown()

    # Collective operations.

    @property
    def is_left_alone(self) -> bool:
        """Whether callbacks are handling an exception that other ranks may not have: no rank may wait now."""
        is_ending = getattr(getattr(self.lightning_module, "_trainer", None), "interrupted", False)
        return self.world_size > 1 and is_ending and not self._exception_is_known

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; not while `is_left_alone`."""
        if model_parallel_is_initialized() and not self.is_left_alone:
            barrier(get_world_group())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's value on all ranks; this rank's own while `is_left_alone`."""
        if not model_parallel_is_initialized() or self.is_left_alone:
            return obj
        return all_gather_object(obj, get_world_group())[src]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """A tensor's mean, sum, maximum or minimum over all ranks, or over those of a torch process group.

        While `is_left_alone` it is this rank's own.

        Args:
            tensor: what is no tensor is given back as it is.
            group: None for all ranks.
            reduce_op: "mean", "sum", "max" or "min", or the like of torch.

        Raises:
            ValueError: another reduction.
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
        """Every rank's tensor, stacked along a new first dim; of one rank the tensor itself."""
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
        """Model and optimizer are filled together, once both exist."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state besides its model, such as metrics; `save_checkpoint` saves the model."""
        state: dict[str, Any] = self.lightning_module.state_dict()
        return {name: value for name, value in state.items() if not name.startswith("model.")}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of loss scaling and rounding; `save_checkpoint` saves the optimizer, by its parameters' names."""
        state: dict[str, Any] = optimizer.precision_state()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint under the first rank's name for it. Called by all ranks; not while `is_left_alone`.

        Raises:
            ValueError: there are `storage_options`.
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
        """Lightning's state in a checkpoint; model and optimizer are filled later. Called by all ranks."""
        self._loaded_from = self.broadcast(os.fspath(checkpoint_path))
        return self.checkpoint_io.load_checkpoint(self._loaded_from)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill the model, and when fitting its optimizer, from the checkpoint loaded last. Called by all ranks."""
        is_fitting = self.lightning_module.trainer.state.fn == _TrainerFn.FITTING
        subjects = self._fitted() if is_fitting and "optimizer_states" in checkpoint else {}
        if "loops" in checkpoint:
            subjects.pop("scheduler", None)  # Lightning fills all there are
        self.checkpoint_io.fill(self._loaded_from, self.lightning_module.model, strict=strict, **subjects)
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore loss scaling and rounding; `load_model_state_dict` fills the optimizer."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_precision_state(state)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def _fitted(self) -> dict[str, Any]:
        """The optimizer and the first scheduler, as far as there are any."""
        subjects: dict[str, Any] = {"optimizer": self.optimizers[0]} if self.optimizers else {}
        if self.lr_scheduler_configs:
            subjects["scheduler"] = self.lr_scheduler_configs[0].scheduler
        return subjects


def _degrees(config: Mapping[str, Any] | None, given: Mapping[str, Any]) -> ParallelDegrees:
    """The degrees of a config; those `given` by axis where there is no config."""
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
    """A device for each rank of this host, where torchrun has started them: the Trainer need not be told."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    device = get_device()
    return [device if is_host(device) else torch.device(device.type, index) for index in range(count)] or None
