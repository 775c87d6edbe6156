"""The documented `load_checkpoint`: loads checkpoints of `save_checkpoint`, Lightning or `nxd train`, at any degrees.

`legacy` loads checkpoints of NeuronX Distributed.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import nxd_ckpt
from nxd_ckpt import Checkpoint, CheckpointError
from nxd_ckpt.coordinator import coordinator_for, on_every_rank, on_rank_zero
from nxd_ckpt.interop import from_checkpoint
from nxd_state import values_changed, whole_parameters
from torch import nn
from torch.optim import Optimizer

from nxd_engine.adapters import settle_adapters, wanted_tensors
from nxd_engine.checkpoints.fill import check_names, check_ties
from nxd_engine.checkpoints.find import Found, NothingSavedError, find_checkpoint, on_every_host
from nxd_engine.checkpoints.legacy import load_legacy_checkpoint
from nxd_engine.checkpoints.optimizer_state import allocate_optimizer_state, optimizer_state, settle_optimizer_state
from nxd_engine.checkpoints.save import finalize_checkpoint
from nxd_engine.checkpoints.state import (
    CheckpointState,
    frozen_weights_of,
    kind_of,
    parameters_in_checkpoint,
    weights_kept_as_masters,
)
from nxd_engine.checkpoints.stored_values import (
    EXTRA_STATES,
    OTHER_STATE,
    SCHEDULER,
    SETTINGS,
    TRAINED_ONLY,
    USER_CONTENT,
    Settings,
    apply_settings,
    holds_dict_state,
    holds_value,
    match_settings,
    read_dict_state,
    set_extra_states,
    unpack_value,
)
from nxd_engine.rank_sync import agree
from nxd_engine.unwrap import UnwrappedObjects, describe_objects, tied_names, unwrap_objects

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Values:
    """The requested contents of a checkpoint, apart from named tensors."""

    settings: Sequence[Settings] | None
    optimizer_dict: dict[str, Any] | None
    other_optimizer_state: dict[str, Any]
    extra_states: dict[str, Any] | None
    scheduler: Any
    user_content: Any


def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
    *,
    optimizer_settings: bool = True,
) -> Any:
    """Fill the given objects from a checkpoint, at any degrees. Called by all ranks.

    Also reads checkpoints of NeuronX Distributed, see `load_legacy_checkpoint`. A saved adapter, with or without its
    base, fills the model's adapter; a model saved without adapters fills the base, and adapters are reset. Tensors of
    another dtype are converted. If a ZeRO optimizer is not loaded along with its model, call its
    `refresh_master_weights()`, since it may hold master weights, or weights in host memory.

    Args:
        path: the folder or URL that was given to `save_checkpoint`.
        tag: the checkpoint; None for the newest complete one. If none is saved yet, a warning is logged and nothing
            is filled, so that a script that resumes by itself can start; `has_checkpoint` tells beforehand.
        model: the model to fill.
        optimizer: the optimizer to fill, together with `model`.
        scheduler: the scheduler to fill by `load_state_dict`.
        num_workers: 1 to 32; has no effect, since each rank reads what it needs.
        strict: require the same names in the checkpoint and the model. Otherwise the names in both are loaded.
        use_zero1_dcp: as in NeuronX Distributed; has no effect, since the checkpoint says how it was saved.
        optimizer_settings: restore the learning rate, weight decay and other settings of the optimizer's groups. With
            False they stay as they are, unless the optimizer's state is saved as one dict with them.

    Returns:
        The user content, None if there is none.

    Raises:
        ValueError: an argument is wrong, or not the same on all ranks.
        CheckpointError: there is no such checkpoint, or it does not fit, is damaged, or would have to run code; on all
            ranks.
    """
    coordinator = coordinator_for(None)
    finalize_checkpoint()

    def describe_call() -> dict[str, object]:
        if isinstance(optimizer, Mapping):
            raise ValueError("optimizer is a dict; pass the optimizer itself, which is filled")
        if scheduler is not None and not hasattr(scheduler, "load_state_dict"):
            raise ValueError(f"scheduler is a {type(scheduler).__name__} without load_state_dict; leave it out")
        return {
            **describe_objects(model, optimizer, scheduler, num_workers),
            "strict": bool(strict),
            "optimizer_settings": bool(optimizer_settings),
        }

    agree(coordinator, "checking the arguments of load_checkpoint", describe_call)
    if use_zero1_dcp:
        _logger.info("use_zero1_dcp has no effect: a checkpoint says how its ZeRO-1 states were saved")
    place = on_rank_zero(coordinator, f"loading from {path}", lambda: _place(path, tag))
    if place is None:
        _logger.warning("nothing is loaded: there is no complete checkpoint in %s yet; training starts fresh", path)
        return None
    found = Found(*place)
    unwrapped = unwrap_objects(model, optimizer)
    if found.layout != "nxd":
        weights = [] if unwrapped.model is None else [it for _, it in parameters_in_checkpoint(unwrapped.model)]
        with on_every_host(found.folder, coordinator) as folder, whole_parameters(weights, changed=True):
            return load_legacy_checkpoint(
                found,
                folder,
                unwrapped.model,
                unwrapped.optimizer,
                scheduler,
                adapters=unwrapped.lora,
                strict=strict,
                optimizer_settings=optimizer_settings,
            )
    where, doing = f"checkpoint {found.tag!r} in {found.root}", f"loading checkpoint {found.tag!r} from {found.root}"
    checkpoint = on_every_rank(coordinator, doing, lambda: nxd_ckpt.open_checkpoint(found.root, found.tag))
    wants_scheduler = scheduler is not None
    values = on_every_rank(coordinator, doing, lambda: _read_values(checkpoint, unwrapped, scheduler=wants_scheduler))
    objects = checkpoint.objects
    into = on_every_rank(
        coordinator, doing, lambda: wanted_tensors(unwrapped.lora, objects, unwrapped.model_tensors(), where)
    )
    if unwrapped.model is not None and holds_value(checkpoint, TRAINED_ONLY):
        frozen = frozen_weights_of(unwrapped.model)
        into = {name: tensor for name, tensor in into.items() if name not in frozen}
    as_masters = weights_kept_as_masters(checkpoint.tensors)
    if strict and unwrapped.model is not None:
        stored = [*checkpoint.tensors, *as_masters]
        tied = tied_names(unwrapped.model)
        check_names(stored, into, tied, where, coordinator)
        source = from_checkpoint(checkpoint)
        on_rank_zero(coordinator, doing, lambda: check_ties(source, tied, where))
    from_masters = {as_masters[name]: tensor for name, tensor in into.items() if name in as_masters}
    into = {name: tensor for name, tensor in into.items() if name in checkpoint.tensors}
    into |= on_every_rank(coordinator, doing, lambda: _make_room(checkpoint, unwrapped, values))
    nxd_ckpt.load(found.root, found.tag, into=into, strict=False, convert_dtype=True)
    if as_masters:  # read a second time, since the optimizer needs the same tensors
        nxd_ckpt.load(found.root, found.tag, into=from_masters, strict=False, convert_dtype=True)
    if unwrapped.model is not None:
        values_changed(it for _, it in parameters_in_checkpoint(unwrapped.model))
    settle_adapters(unwrapped.lora, objects)
    on_every_rank(
        coordinator, doing, lambda: _hand_over(values, unwrapped, scheduler, strict=strict, settings=optimizer_settings)
    )
    return values.user_content


def _place(path: str | os.PathLike[str], tag: str | None) -> tuple[Any, ...] | None:
    """Find the checkpoint; None if no tag is given and nothing is saved yet."""
    try:
        return astuple(find_checkpoint(path, tag))
    except NothingSavedError:
        return None


def checkpoint_parts(path: str | os.PathLike[str], tag: str | None = None) -> set[str]:
    """Return which of "model", "optimizer" and "scheduler" a checkpoint can fill. Called by all ranks.

    A checkpoint of NeuronX Distributed is not inspected: it returns all of them.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged; on all ranks.
    """
    coordinator = coordinator_for(None)
    finalize_checkpoint()
    found = Found(*on_rank_zero(coordinator, f"looking into {path}", lambda: astuple(find_checkpoint(path, tag))))
    if found.layout != "nxd":
        return {"model", "optimizer", "scheduler"}
    doing = f"looking into checkpoint {found.tag!r} in {found.root}"
    checkpoint = on_every_rank(coordinator, doing, lambda: nxd_ckpt.open_checkpoint(found.root, found.tag))
    kinds = {kind_of(name) for name in checkpoint.tensors} - {"run"}
    return kinds | ({SCHEDULER} if holds_value(checkpoint, SCHEDULER) else set())


def _read_values(checkpoint: Checkpoint, unwrapped: UnwrappedObjects, *, scheduler: bool) -> _Values:
    """Read everything except the tensors of model and optimizer, and check it before anything is filled."""
    if scheduler and not holds_value(checkpoint, SCHEDULER):
        raise CheckpointError("it holds no scheduler; leave out scheduler=")
    settings: list[Settings] | None = None
    optimizer_dict: dict[str, Any] | None = None
    if unwrapped.optimizer is not None:
        if holds_dict_state(checkpoint):
            optimizer_dict = read_dict_state(checkpoint)
        elif unwrapped.model is None:
            raise CheckpointError("it stores optimizer states by parameter names; pass model= as well")
        elif holds_value(checkpoint, SETTINGS):
            settings = match_settings(unpack_value(checkpoint, SETTINGS), unwrapped.group_names)
        elif not any(kind_of(name) == "optimizer" for name in checkpoint.tensors):
            raise CheckpointError("it holds no optimizer state; leave out optimizer=")
    return _Values(
        settings,
        optimizer_dict,
        unpack_value(checkpoint, OTHER_STATE) or {},
        None if unwrapped.model is None else unpack_value(checkpoint, EXTRA_STATES),
        unpack_value(checkpoint, SCHEDULER) if scheduler else None,
        unpack_value(checkpoint, USER_CONTENT),
    )


def _make_room(checkpoint: Checkpoint, unwrapped: UnwrappedObjects, values: _Values) -> CheckpointState:
    """Return the optimizer's tensors, ready to be filled; drops its previous state."""
    if unwrapped.model is None or unwrapped.optimizer is None or values.optimizer_dict is not None:
        return {}
    stored = {name: (info.dtype, info.global_shape) for name, info in checkpoint.tensors.items()}
    allocate_optimizer_state(unwrapped.model, unwrapped.optimizer, stored)
    return optimizer_state(unwrapped.model, unwrapped.optimizer)


def _hand_over(values: _Values, unwrapped: UnwrappedObjects, scheduler: Any, *, strict: bool, settings: bool) -> None:
    """Give the optimizer and the scheduler everything except the parameters' tensors."""
    if unwrapped.optimizer is not None and values.optimizer_dict is not None:
        unwrapped.optimizer.load_state_dict(values.optimizer_dict)
    elif unwrapped.optimizer is not None and settings and values.settings is not None:
        apply_settings(values.settings, unwrapped.optimizer)
    elif unwrapped.optimizer is not None and settings:
        _logger.warning(
            "the checkpoint holds no learning rate and other settings of the optimizer: the first step takes those "
            "with which it was made here"
        )
    if unwrapped.optimizer is not None and values.optimizer_dict is None:
        settle_optimizer_state(unwrapped.optimizer, values.other_optimizer_state)
    if unwrapped.model is not None:
        set_extra_states(unwrapped.model, values.extra_states, strict=strict)
    if scheduler is not None:
        scheduler.load_state_dict(values.scheduler)
