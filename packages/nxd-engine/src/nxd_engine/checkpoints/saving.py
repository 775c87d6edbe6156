"""The documented `save_checkpoint`, on nxd_ckpt: complete or absent, loadable anywhere; also in the background.

Tensors are stored by their names in the unsharded model, so a checkpoint loads at any tensor-, pipeline- and
data-parallel degrees, with ZeRO-1 or without. Scripts, Lightning and `nxd train` all save through `write_checkpoint`.
"""

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import nxd_ckpt
from nxd_ckpt import AsyncSave, CheckpointError
from nxd_ckpt.coordinator import coordinator_for, on_every_rank, on_rank_zero
from nxd_ckpt.interop import as_extra
from nxd_ckpt.stores import open_store
from nxd_layers.upstream_arguments import takes_names_too
from nxd_optim import NeuronZero1Optimizer
from nxd_state import get_mesh, model_parallel_is_initialized
from nxd_state.neuron import extracting_graphs
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_engine.adapters import describe_adapter, saved_tensors, weights_to_save, write_description
from nxd_engine.checkpoints.state import (
    CheckpointState,
    optimizer_state,
    other_optimizer_state,
    saved_here,
    weights_of_wider_masters,
)
from nxd_engine.checkpoints.stored_values import (
    EXTRA_STATES,
    METRICS,
    OTHER_STATE,
    SCHEDULER,
    SETTINGS,
    USER_CONTENT,
    dict_state,
    gather_extra_states,
    gather_settings,
    pack_values,
)
from nxd_engine.checkpoints.tags import check_kept, choose_tag, is_untagged, keep_newest
from nxd_engine.model_description import ADAPTER_KEY, ModelDescription, describe_model, with_companions
from nxd_engine.rank_sync import agree, is_first_replica
from nxd_engine.unwrap import Subjects, buffer_names, describe_subjects, plain_model, subjects_of

_logger = logging.getLogger(__name__)

_FINISHING = "finishing a checkpoint, and dropping old ones"


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint to save.

    Attributes:
        model: see `save_checkpoint`.
        optimizer: see `save_checkpoint`.
        scheduler: see `save_checkpoint`.
        user_content: see `save_checkpoint`.
        zero1_optimizer: see `save_checkpoint`.
        with_settings: whether to keep the settings of the optimizer's groups, such as their learning rates.
        description: the model's description, for readers of the checkpoint that do not have one.
        run_tensors: further tensors of a run, such as this rank's random streams, under names of kind "run".
        narrow_weights: whether to keep weights whose wider master weights are also kept.
        step: optimizer steps taken.
        metrics: metrics by which retention chooses checkpoints.
    """

    model: nn.Module | None = None
    optimizer: Optimizer | Mapping[str, Any] | None = None
    scheduler: Any = None
    user_content: Any = None
    zero1_optimizer: bool = False
    with_settings: bool = True
    description: ModelDescription | None = None
    run_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    narrow_weights: bool = True
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@takes_names_too(checkpoint_dir_str="path")
def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str = "",
    model: nn.Module | None = None,
    optimizer: Optimizer | Mapping[str, Any] | None = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
    *,
    nxd_config: Any = None,
) -> None:
    """Save a checkpoint atomically: it is complete or absent. Called by all ranks.

    A checkpoint of the same tag is replaced; it stays valid until the new one is complete. A save waits for an earlier
    background save. `num_workers`, `use_xser` and `use_zero1_dcp` have no effect: every rank writes its own tensors one
    at a time in any case, a ZeRO-1 state has the name of its parameter, and the files open with safetensors. Under
    `neuron_parallel_compile`, where all values are zeros, nothing is written.

    Args:
        path: the folder of the checkpoints, or a URL such as "s3://bucket/runs"; `checkpoint_dir_str` is another name.
        tag: this checkpoint's name. Without one, `path` itself becomes the checkpoint.
        model: any module, `NxDModel` or `NxDPPModel`; a model with adapters is saved as its `LoraConfig` says. Buffers
            are taken from the first replica.
        optimizer: an optimizer, saved by the names of the model's parameters. A `state_dict`, or an optimizer without
            a model, is saved per rank and loads only at the same degrees.
        scheduler: any object with a `state_dict()`.
        user_content: plain values and tensors; rank 0's are saved.
        num_workers: 1 to 32.
        use_xser: as in the existing library; has no effect here.
        num_kept_ckpts: number of newest checkpoints in `path` to keep; None or -1 keeps all. Applied once this one is
            complete; ignored without a tag.
        async_save: return when the tensors are copied, and write them in the background; see `finalize_checkpoint`.
        zero1_optimizer: whether `optimizer` is the `state_dict` of a ZeRO-1 optimizer, different on each replica.
        use_zero1_dcp: as in the existing library; has no effect here.
        avoid_saving_lower_precision_weights: leave out weights whose float32 master weights are saved, as by ZeRO-1
            with `use_master_weights_in_ckpt`; loading rounds them again. A model with adapters is saved whole.
        nxd_config: accepted for scripts that pass it.

    Raises:
        ValueError: an argument is wrong or not the same on all ranks, or something could only be read back by running
            code; nothing was written.
        CheckpointError: a rank could not write, or the earlier background save failed; on all ranks.
    """
    if extracting_graphs():
        return
    coordinator = coordinator_for(None)
    finalize_checkpoint()

    def describe_call() -> dict[str, object]:
        kept = check_kept(num_kept_ckpts)
        subjects = describe_subjects(model, optimizer, scheduler, num_workers)
        flags = {"async_save": async_save, "zero1_optimizer": zero1_optimizer}
        flags["avoid_saving_lower_precision_weights"] = avoid_saving_lower_precision_weights
        return {**subjects, "num_kept_ckpts": kept, **flags}

    agree(coordinator, "checking the arguments of save_checkpoint", describe_call)
    root, name, step = on_rank_zero(coordinator, "choosing the tag of a checkpoint", lambda: choose_tag(path, tag))

    def drop_old_ones() -> None:
        if not is_untagged(tag):  # otherwise the checkpoints next to this one belong to other runs
            keep_newest(root, check_kept(num_kept_ckpts))

    if use_zero1_dcp:
        _logger.info("use_zero1_dcp has no effect: ZeRO-1 states load at any degrees in any case")
    described = None if model is None else describe_model(model, plain_model(model))
    contents = Contents(
        model,
        optimizer,
        scheduler,
        user_content,
        zero1_optimizer,
        description=with_companions(described) if described and coordinator.rank == 0 else described,
        narrow_weights=not avoid_saving_lower_precision_weights,
        step=step,
    )
    write_checkpoint(root, name, contents, finish=drop_old_ones, in_background=async_save)


def write_checkpoint(
    root: str | os.PathLike[str],
    tag: str,
    contents: Contents,
    *,
    finish: Callable[[], None],
    in_background: bool,
    incremental: bool = False,
    check_replicas: bool = False,
) -> None:
    """Write a checkpoint, replacing one of the same tag, once the previous save is complete. Called by all ranks.

    Args:
        root: the folder of checkpoints.
        tag: name of this checkpoint.
        contents: the contents of the checkpoint.
        finish: called by rank 0 when the checkpoint is complete; for a background save, by the next save, load or
            `finalize_checkpoint`.
        in_background: return when the tensors are copied.
        incremental: reference tensors that the previous checkpoint already holds.
        check_replicas: compare the copies that several ranks hold, bit by bit.

    Raises:
        ValueError: something could only be read back by running code; nothing was written.
        CheckpointError: a rank could not write, or the earlier background save failed; on all ranks.
    """
    finalize_checkpoint()
    coordinator = coordinator_for(None)
    doing = f"preparing checkpoint {tag!r}"
    subjects = subjects_of(contents.model, contents.optimizer)
    names = on_every_rank(coordinator, doing, lambda: subjects.group_names, error_type=ValueError)
    settings = None
    if subjects.optimizer is not None and names and contents.with_settings:
        settings = gather_settings(names, subjects.optimizer)
    adapter = describe_adapter(subjects.lora)
    extra_states = gather_extra_states(subjects.model, coordinator, doing)

    def pack() -> tuple[dict[str, Any], dict[str, bytes]]:
        values = {
            SETTINGS: settings,
            EXTRA_STATES: extra_states,
            OTHER_STATE: (subjects.model and subjects.optimizer and other_optimizer_state(subjects.optimizer)) or None,
            SCHEDULER: None if contents.scheduler is None else contents.scheduler.state_dict(),
            USER_CONTENT: contents.user_content,
            METRICS: dict(contents.metrics) or None,
            ADAPTER_KEY: adapter,
        }
        objects, extra = pack_values(values)
        if contents.description is None:
            return objects, extra
        return objects | contents.description.as_objects(), extra | as_extra(contents.description.files)

    objects, extra = on_every_rank(coordinator, doing, pack, error_type=ValueError)

    def finish_it() -> None:
        if open_store(root).capabilities.other_files:  # otherwise no other program can read it
            write_description(adapter, subjects.lora, os.fspath(root), tag)
        finish()

    with weights_to_save(subjects.lora, coordinator, doing):
        state = on_every_rank(coordinator, doing, lambda: _tensors(subjects, contents), error_type=ValueError)
        arguments: dict[str, Any] = {
            "objects": objects,
            "extra": extra,
            "mesh": asdict(get_mesh()) if model_parallel_is_initialized() else None,
            "step": contents.step,
            "overwrite": True,
            "incremental": incremental,
            "check_replicas": check_replicas,
        }
        if in_background:
            handle = nxd_ckpt.async_save(root, tag, state, **arguments)
            _pending.append(_PendingSave(handle, finish_it, is_first_rank=coordinator.rank == 0))
        else:
            nxd_ckpt.save(root, tag, state, **arguments)
    if not in_background:
        on_rank_zero(coordinator, _FINISHING, finish_it)


def finalize_checkpoint() -> None:
    """Wait for the background save, then delete the checkpoints that are not kept. Called by all ranks.

    Each save and load calls it first; without a pending save it does nothing. A program also finishes its save on exit.

    Raises:
        CheckpointError: the save failed; on all ranks.
    """
    while _pending:
        save = _pending.pop()
        save.handle.wait()
        on_rank_zero(coordinator_for(None), _FINISHING, save.finish_on_first_rank)


def abandon_checkpoint() -> None:
    """Drop the background save, which cannot complete because ranks are lost. Waits until it has ended on this rank."""
    while _pending:
        with suppress(CheckpointError):
            _pending.pop().handle.wait()


def is_saving() -> bool:
    """Whether a background save is not complete yet, or has failed; ranks may notice it at different times."""
    return any(not save.handle.committed for save in _pending)


def _narrow_weights(subjects: Subjects) -> set[str]:
    """Return the names of the weights that the checkpoint can leave out; logs a line if there are none."""
    model, optimizer = subjects.model, subjects.optimizer
    found: set[str] = set()
    if model is not None and optimizer is not None and subjects.lora is None:
        found = weights_of_wider_masters(model, optimizer)
    if not found:
        _logger.info("avoid_saving_lower_precision_weights has no effect: no wider master weights are saved")
    return found


def _tensors(subjects: Subjects, contents: Contents) -> CheckpointState:
    """Return this rank's tensors for the checkpoint."""
    model, optimizer, given = subjects.model, subjects.optimizer, contents.optimizer
    state = subjects.model_tensors()
    if model is not None and not is_first_replica():  # batch statistics differ between replicas
        buffers = buffer_names(model)
        state = {name: tensor for name, tensor in state.items() if name not in buffers}
    if model is not None and optimizer is not None:
        state |= optimizer_state(model, optimizer)
    elif optimizer is not None:
        state |= dict_state(optimizer.state_dict(), zero1=isinstance(optimizer, NeuronZero1Optimizer))
    elif isinstance(given, Mapping):
        state |= dict_state(given, zero1=contents.zero1_optimizer)
    if not contents.narrow_weights:
        narrow = _narrow_weights(subjects)
        state = {name: tensor for name, tensor in state.items() if name not in narrow}
    if model is not None:
        state = saved_tensors(subjects.lora, saved_here(model, state))
    return {**state, **contents.run_tensors}


@dataclass(frozen=True)
class _PendingSave:
    """A background save, and the work to do once it is complete."""

    handle: AsyncSave
    finish: Callable[[], None]
    is_first_rank: bool

    def finish_on_first_rank(self) -> None:
        """Do the work that follows the commit, on the first rank only."""
        if self.is_first_rank:
            self.finish()


_pending: list[_PendingSave] = []  # at most one


def _finish_at_exit() -> None:
    """Like `finalize_checkpoint`, but without communicating with other ranks, whose processes may be gone."""
    while _pending:
        save = _pending.pop()
        save.handle.wait()
        save.finish_on_first_rank()


# Runs before nxd_ckpt's own, which was registered earlier.
atexit.register(_finish_at_exit)
