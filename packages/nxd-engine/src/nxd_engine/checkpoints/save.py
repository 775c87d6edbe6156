"""The documented `save_checkpoint`, on nxd_ckpt: complete or absent, loadable anywhere; also in the background.

Tensors are stored by their names in the unsharded model, so a checkpoint loads at any tensor-, pipeline- and
data-parallel degrees, with ZeRO or without. Scripts, Lightning and `nxd train` all save through `write_checkpoint`.
"""

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import nxd_ckpt
from nxd_ckpt import AsyncSave, CheckpointError
from nxd_ckpt.coordinator import coordinator_for, gather_from_every_rank, on_every_rank, on_rank_zero
from nxd_ckpt.stores import open_store
from nxd_state import get_mesh, model_parallel_is_initialized
from nxd_state.neuron import extracting_graphs
from torch import nn
from torch.optim import Optimizer

from nxd_engine.adapters import describe_adapter, weights_to_save, write_description
from nxd_engine.checkpoints.contents import (
    Contents,
    PreparedContents,
    prepare_contents,
    tensors_to_save,
    values_of_all_stages,
)
from nxd_engine.checkpoints.find import KEEP_ALL, check_kept, choose_tag, keep_newest
from nxd_engine.checkpoints.model_description import describe_model, with_companions
from nxd_engine.checkpoints.stored_values import check_equal_states, digests_of
from nxd_engine.rank_sync import check_same_call
from nxd_engine.unwrap import describe_objects, plain_model

_logger = logging.getLogger(__name__)

_FINISHING = "finishing a checkpoint, and dropping old ones"


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
    frozen_weights: bool = True,
    nxd_config: Any = None,
) -> None:
    """Save a checkpoint atomically: it is complete or absent. Called by all ranks.

    A checkpoint of the same tag is replaced; it stays valid until the new one is complete. A save waits for an earlier
    background save. `num_workers`, `use_xser` and `use_zero1_dcp` have no effect: every rank writes its own tensors one
    at a time in any case, a ZeRO state has the name of its parameter, and the files open with safetensors. Under
    `neuron_parallel_compile`, where all values are zeros, nothing is written.

    Args:
        path: the folder of the checkpoints, or a URL such as "s3://bucket/runs".
        tag: this checkpoint's name. Without one, `path` itself becomes the checkpoint.
        model: any module, `NxDModel` or `NxDPPModel`; a model with adapters is saved as its `LoraConfig` says. Buffers
            are taken from the first replica.
        optimizer: an optimizer, saved by the names of the model's parameters. A `state_dict`, or an optimizer without
            a model, is saved per rank and loads only at the same degrees.
        scheduler: any object with a `state_dict()`.
        user_content: plain values and tensors; rank 0's are saved.
        num_workers: 1 to 32.
        use_xser: as in NeuronX Distributed; has no effect here.
        num_kept_ckpts: number of newest checkpoints in `path` to keep; None or -1 keeps all. Applied once this one is
            complete; ignored without a tag.
        async_save: return when the tensors are copied, and write them in the background; see `finalize_checkpoint`.
        zero1_optimizer: whether `optimizer` is the `state_dict` of a ZeRO optimizer, different on each replica.
        use_zero1_dcp: as in NeuronX Distributed; has no effect here.
        avoid_saving_lower_precision_weights: leave out weights whose float32 master weights are saved, as by ZeRO
            with `use_master_weights_in_ckpt`; loading rounds them again. A model with adapters is saved whole.
        frozen_weights: whether to save weights that do not train. A checkpoint without them loads into a model that
            has them already, such as one with adapters.
        nxd_config: accepted for scripts that pass it.

    Raises:
        ValueError: an argument is wrong or not the same on all ranks, or something could only be read back by running
            code; nothing was written.
        CheckpointError: a rank could not write, or the earlier background save failed; on all ranks.
    """
    if extracting_graphs():
        return
    if use_zero1_dcp:
        _logger.info("use_zero1_dcp has no effect: ZeRO-1 states load at any degrees in any case")
    finalize_checkpoint()
    doing = "checking the arguments of save_checkpoint"
    is_first_rank = coordinator_for(None).rank == 0

    def describe_call() -> _SaveCall:
        arguments = {
            **describe_objects(model, optimizer, scheduler, num_workers),
            "num_kept_ckpts": check_kept(num_kept_ckpts),
            "async_save": async_save,
            "zero1_optimizer": zero1_optimizer,
            "avoid_saving_lower_precision_weights": avoid_saving_lower_precision_weights,
            "frozen_weights": frozen_weights,
        }
        described = None if model is None else describe_model(model, plain_model(model))
        contents = Contents(
            model,
            optimizer,
            scheduler,
            user_content,
            zero1_optimizer,
            description=with_companions(described) if described and is_first_rank else described,
            narrow_weights=not avoid_saving_lower_precision_weights,
            frozen_weights=frozen_weights,
        )
        return _SaveCall(contents, arguments, _choose_target(path, tag) if is_first_rank else None)

    prepared, target = _prepare(doing, describe_call)
    if "problem" in target:
        raise CheckpointError(f"choosing the tag of a checkpoint failed: {target['problem']}")
    root = target["root"]
    drops_old = num_kept_ckpts not in (None, KEEP_ALL) and target["has_tag"]  # without one, root has other runs' too
    _write(
        prepared,
        root,
        target["tag"],
        target["step"],
        doing=doing,
        finish=(lambda: keep_newest(root, check_kept(num_kept_ckpts))) if drops_old else None,
        in_background=async_save,
    )


def _choose_target(path: str | os.PathLike[str], tag: str) -> dict[str, Any]:
    """Return where rank 0 saves to, or the problem: not an exception, which would be reported as a wrong argument."""
    try:
        root, chosen, step = choose_tag(path, tag)
    except (CheckpointError, ValueError) as error:
        return {"problem": str(error)}
    except OSError as error:
        return {"problem": f"{type(error).__name__}: {error}"}
    return {"root": root, "tag": chosen, "step": step, "has_tag": bool(tag)}


def write_checkpoint(
    root: str | os.PathLike[str],
    tag: str,
    contents: Contents,
    *,
    finish: Callable[[], None] | None,
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
            `finalize_checkpoint`. None, on all ranks, if there is nothing to do.
        in_background: return when the tensors are copied.
        incremental: reference tensors that the previous checkpoint already holds.
        check_replicas: compare the copies that several ranks hold, bit by bit.

    Raises:
        ValueError: something could only be read back by running code; nothing was written.
        CheckpointError: a rank could not write, or the earlier background save failed; on all ranks.
    """
    finalize_checkpoint()
    doing = f"preparing checkpoint {tag!r}"
    prepared, target = _prepare(doing, lambda: _SaveCall(contents, {}, (os.fspath(root), tag, contents.step)))
    _write(
        prepared,
        *target,
        doing=doing,
        finish=finish,
        in_background=in_background,
        incremental=incremental,
        check_replicas=check_replicas,
    )


@dataclass(frozen=True)
class _SaveCall:
    """A call that saves, as one rank makes it.

    Attributes:
        contents: this rank's contents.
        arguments: the arguments that must be the same on all ranks, by name.
        target: where to save, as a JSON-serializable value; rank 0's counts.
    """

    contents: Contents
    arguments: Mapping[str, object]
    target: Any


def _prepare(doing: str, describe_call: Callable[[], _SaveCall]) -> tuple[PreparedContents, Any]:
    """Do everything that can fail on one rank before one gather, in which all ranks raise or none.

    Args:
        doing: the operation, for messages.
        describe_call: checks this rank's arguments, and describes the call.

    Returns:
        This rank's prepared contents, and the target of rank 0.
    """
    prepared: PreparedContents

    def prepare() -> dict[str, Any]:
        nonlocal prepared  # the gather returns only what can be sent
        call = describe_call()
        prepared = prepare_contents(call.contents)
        digests = digests_of(prepared.extra_states)
        return {"call": {"call": doing, **call.arguments}, "digests": digests, "target": call.target}

    of_ranks = gather_from_every_rank(coordinator_for(None), doing, prepare, error_type=ValueError)
    check_same_call([of_rank["call"] for of_rank in of_ranks])
    check_equal_states([of_rank["digests"] for of_rank in of_ranks], doing)
    return prepared, of_ranks[0]["target"]


def _write(
    prepared: PreparedContents,
    root: str,
    tag: str,
    step: int | None,
    *,
    doing: str,
    finish: Callable[[], None] | None,
    in_background: bool,
    incremental: bool = False,
    check_replicas: bool = False,
) -> None:
    """Write prepared contents, or start to; arguments are those of `write_checkpoint`. Called by all ranks."""
    coordinator, lora = coordinator_for(None), prepared.unwrapped.lora
    adapter = describe_adapter(lora)
    objects, extra = values_of_all_stages(prepared, adapter)

    def finish_save() -> None:
        if open_store(root).capabilities.other_files:  # otherwise no other program can read it
            write_description(adapter, lora, root, tag)
        if finish is not None:
            finish()

    with weights_to_save(lora, coordinator, doing):
        state = prepared.tensors
        if state is None:  # the adapters' weights are merged, or unmerged, only now
            state = on_every_rank(
                coordinator,
                doing,
                lambda: tensors_to_save(prepared.unwrapped, prepared.contents),
                error_type=ValueError,
            )
        save = nxd_ckpt.async_save if in_background else nxd_ckpt.save
        handle = save(
            root,
            tag,
            state,
            objects=objects,
            extra=extra,
            mesh=asdict(get_mesh()) if model_parallel_is_initialized() else None,
            step=step,
            overwrite=True,
            incremental=incremental,
            check_replicas=check_replicas,
        )
    needs_finish = finish is not None or lora is not None
    started = _Save(handle, finish_save if needs_finish else None, is_first_rank=coordinator.rank == 0)
    if in_background:
        _pending.append(started)
    else:
        started.complete()


def finalize_checkpoint() -> None:
    """Wait for the background save, then delete the checkpoints that are not kept. Called by all ranks.

    Each save and load calls it first; without a pending save it does nothing. A program also finishes its save on exit.

    Raises:
        CheckpointError: the save failed; on all ranks.
    """
    while _pending:
        _pending.pop().complete()


def abandon_checkpoint() -> None:
    """Drop the background save, which cannot complete because ranks are lost. Waits until it has ended on this rank."""
    while _pending:
        with suppress(CheckpointError):
            _pending.pop().wait()


def is_saving() -> bool:
    """Whether a background save is not complete yet, or has failed; ranks may notice it at different times."""
    return any(not save.is_complete for save in _pending)


@dataclass(frozen=True)
class _Save:
    """A save that has been written, or is being written in the background.

    Attributes:
        handle: the background save.
        finish: the work of rank 0 once the checkpoint is complete; None on all ranks if there is none.
        is_first_rank: whether this is rank 0.
    """

    handle: AsyncSave | None
    finish: Callable[[], None] | None
    is_first_rank: bool

    def complete(self) -> None:
        """Wait until the checkpoint is complete, and finish it. Called by all ranks."""
        self.wait()
        if self.finish is not None:
            on_rank_zero(coordinator_for(None), _FINISHING, self.finish)

    def complete_alone(self) -> None:
        """Like `complete`, but without communicating with other ranks, whose processes may be gone."""
        self.wait()
        if self.finish is not None and self.is_first_rank:
            self.finish()

    def wait(self) -> None:
        """Wait until the checkpoint is complete."""
        if self.handle is not None:
            self.handle.wait()

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint is complete."""
        return self.handle is None or self.handle.committed


_pending: list[_Save] = []  # at most one


def _finish_at_exit() -> None:
    while _pending:
        _pending.pop().complete_alone()


# Runs before nxd_ckpt's own, which was registered earlier.
atexit.register(_finish_at_exit)
