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
        description: of the model, for readers of the checkpoint that do not have one.
        run_tensors: further tensors of a run, such as this rank's random streams, under names of kind "run".
        narrow_weights: whether to keep weights whose wider master weights are kept, too.
        step: optimizer steps taken.
        metrics: by which retention chooses checkpoints.
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

    A checkpoint of the same tag is replaced; it stays valid until the new one is complete. A save waits for the one in
    the background before it. `num_workers`, `use_xser` and `use_zero1_dcp` change nothing: every rank writes its own
    tensors one at a time in any case, a state of ZeRO-1 has the name of its parameter, and the files open with
    safetensors. Under `neuron_parallel_compile`, where all values are zeros,
    nothing is written.

    Args:
        path: the folder of the checkpoints, or a URL such as "s3://bucket/runs"; `checkpoint_dir_str` is another name.
        tag: this checkpoint's name. Without one, `path` itself becomes the checkpoint.
        model: any module, `NxDModel` or `NxDPPModel`; one with adapters is saved as its `LoraConfig` says. Buffers are
            those of the first replica.
        optimizer: saved by the names of the model's parameters. A `state_dict`, or an optimizer without a model, is
            saved as each rank has it, and loads at the same degrees only.
        scheduler: anything with a `state_dict()`.
        user_content: plain values and tensors; rank 0's counts.
        num_workers: 1 to 32.
        use_xser: as the existing library's.
        num_kept_ckpts: how many of the newest in `path` stay; None or -1: all. Applied once this one is complete, and
            without a tag not at all.
        async_save: return when the tensors are copied, and write them in the background; see `finalize_checkpoint`.
        zero1_optimizer: `optimizer` is the `state_dict` of a ZeRO-1 optimizer, different on each replica.
        use_zero1_dcp: as the existing library's; without effect here.
        avoid_saving_lower_precision_weights: leave out the weights whose float32 master weights are saved, so those of
            ZeRO-1 with `use_master_weights_in_ckpt`; loading rounds them again. A model with adapters is saved whole.
        nxd_config: taken for scripts that give it.

    Raises:
        ValueError: an argument is wrong or not the same on all ranks, or something could only be read back by running
            code; nothing was written.
        CheckpointError: a rank could not write, or the save in the background before has failed; on all ranks.
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
        if not is_untagged(tag):  # else the checkpoints beside this one are of other runs
            keep_newest(root, check_kept(num_kept_ckpts))

    if use_zero1_dcp:
        _logger.info("use_zero1_dcp changes nothing: states of ZeRO-1 load at any degrees in any case")
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
    """Write a checkpoint, replacing one of the same tag, once the one before is complete. Called by all ranks.

    Args:
        root: the folder that is to hold it.
        tag: its name.
        contents: what it holds.
        finish: called by rank 0 when it is complete: in the background by the next save, load or
            `finalize_checkpoint`.
        in_background: return when the tensors are copied.
        incremental: reference what the checkpoint before holds already.
        check_replicas: compare the copies of what several ranks hold, bit by bit.

    Raises:
        ValueError: something could only be read back by running code; nothing was written.
        CheckpointError: a rank could not write, or the save in the background before has failed; on all ranks.
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
        if open_store(root).capabilities.other_files:  # else nobody else reads it
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
    """Wait for the save in the background, then delete the checkpoints that are not kept. Called by all ranks.

    Each save and load calls it first; without a save it does nothing. A program that ends finishes its save, too.

    Raises:
        CheckpointError: the save failed; on all ranks.
    """
    while _pending:
        save = _pending.pop()
        save.handle.wait()
        on_rank_zero(coordinator_for(None), _FINISHING, save.finish_on_first_rank)


def abandon_checkpoint() -> None:
    """Forget the save in the background, as it cannot be completed: ranks are lost. Waits until it has ended here."""
    while _pending:
        with suppress(CheckpointError):
            _pending.pop().handle.wait()


def is_saving() -> bool:
    """Whether a save in the background is not complete yet, or has failed; ranks may notice it at different times."""
    return any(not save.handle.committed for save in _pending)


def _narrow_weights(subjects: Subjects) -> set[str]:
    """The names of the weights that a checkpoint of these can do without; says so where there are none."""
    model, optimizer = subjects.model, subjects.optimizer
    found: set[str] = set()
    if model is not None and optimizer is not None and subjects.lora is None:
        found = weights_of_wider_masters(model, optimizer)
    if not found:
        _logger.info("avoid_saving_lower_precision_weights changes nothing: no wider master weights are saved")
    return found


def _tensors(subjects: Subjects, contents: Contents) -> CheckpointState:
    """This rank's tensors for the checkpoint."""
    model, optimizer, given = subjects.model, subjects.optimizer, contents.optimizer
    state = subjects.model_tensors()
    if model is not None and not is_first_replica():  # statistics of batches differ between replicas
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
    """A save in the background, and the work to do once it is complete."""

    handle: AsyncSave
    finish: Callable[[], None]
    is_first_rank: bool

    def finish_on_first_rank(self) -> None:
        """Do the work that follows the commit; nothing on all ranks but the first."""
        if self.is_first_rank:
            self.finish()


_pending: list[_PendingSave] = []  # one at most


def _finish_at_exit() -> None:
    """As `finalize_checkpoint`, but without asking other ranks, whose processes may be gone."""
    while _pending:
        save = _pending.pop()
        save.handle.wait()
        save.finish_on_first_rank()


# Runs before nxd_ckpt's own, which was registered earlier.
atexit.register(_finish_at_exit)
