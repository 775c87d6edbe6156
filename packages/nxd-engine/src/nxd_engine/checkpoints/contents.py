"""The contents of a checkpoint to save, and this rank's part of them: tensors by logical name, and packed values."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.interop import as_extra
from nxd_optim import NeuronZero1Optimizer
from nxd_state import active_group, all_gather_object
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_engine.adapters import saved_tensors
from nxd_engine.checkpoints.model_description import ADAPTER_KEY, ModelDescription
from nxd_engine.checkpoints.optimizer_state import optimizer_state, other_optimizer_state, weights_of_wider_masters
from nxd_engine.checkpoints.state import CheckpointState, frozen_weights_of, saved_here
from nxd_engine.checkpoints.stored_values import (
    EXTRA_STATES,
    METRICS,
    OTHER_STATE,
    SCHEDULER,
    SETTINGS,
    TRAINED_ONLY,
    USER_CONTENT,
    dict_state,
    extra_states,
    group_settings,
    pack_values,
)
from nxd_engine.rank_sync import is_first_replica
from nxd_engine.unwrap import UnwrappedObjects, buffer_names, unwrap_objects

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint to save: its first five are arguments of `save_checkpoint`.

    Attributes:
        with_settings: whether to keep the settings of the optimizer's groups, such as their learning rates.
        description: the model's description, for readers of the checkpoint that do not have one.
        run_tensors: further tensors of a run, such as this rank's random streams, under names of kind "run".
        narrow_weights: whether to keep weights whose wider master weights are also kept.
        frozen_weights: whether to keep weights that do not train.
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
    frozen_weights: bool = True
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedContents:
    """This rank's part of a checkpoint, made without communication."""

    unwrapped: UnwrappedObjects
    contents: Contents
    objects: dict[str, Any]
    extra: dict[str, bytes]
    settings: list[dict[str, Any]]
    extra_states: dict[str, Any]
    tensors: CheckpointState | None  # None if adapters have to be merged or described first


def prepare_contents(contents: Contents) -> PreparedContents:
    """Collect this rank's part of a checkpoint.

    Raises:
        ValueError: something could only be read back by running code, or does not belong to the model.
    """
    unwrapped = unwrap_objects(contents.model, contents.optimizer)
    names = unwrapped.group_names
    settings: list[dict[str, Any]] = []
    if unwrapped.optimizer is not None and contents.with_settings:
        settings = group_settings(names, unwrapped.optimizer)
    own_states = extra_states(unwrapped.model)
    pack_values({SETTINGS: settings, EXTRA_STATES: own_states})  # raises here what is packed with those of other ranks
    values = {
        OTHER_STATE: (unwrapped.model and unwrapped.optimizer and other_optimizer_state(unwrapped.optimizer)) or None,
        SCHEDULER: None if contents.scheduler is None else contents.scheduler.state_dict(),
        USER_CONTENT: contents.user_content,
        METRICS: dict(contents.metrics) or None,
        TRAINED_ONLY: None if contents.frozen_weights else True,
    }
    objects, extra = pack_values(values)
    if contents.description is not None:
        objects |= contents.description.as_objects()
        extra |= as_extra(contents.description.files)
    tensors = tensors_to_save(unwrapped, contents) if unwrapped.lora is None else None
    return PreparedContents(unwrapped, contents, objects, extra, settings, own_states, tensors)


def values_of_all_stages(
    prepared: PreparedContents, adapter: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return all values to save, with those of the other stages of a pipeline. Called by all ranks."""
    stages = all_gather_object((prepared.settings, prepared.extra_states), active_group("pp"))
    objects, extra = pack_values(
        {
            SETTINGS: [entry for settings, _ in stages for entry in settings] or None,
            EXTRA_STATES: {name: value for _, states in stages for name, value in states.items()} or None,
            ADAPTER_KEY: adapter,
        }
    )
    return prepared.objects | objects, prepared.extra | extra


def _narrow_weights(unwrapped: UnwrappedObjects) -> set[str]:
    """Return the names of the weights that the checkpoint can leave out; logs a line if there are none."""
    model, optimizer = unwrapped.model, unwrapped.optimizer
    found: set[str] = set()
    if model is not None and optimizer is not None and unwrapped.lora is None:
        found = weights_of_wider_masters(model, optimizer)
    if not found:
        _logger.info("avoid_saving_lower_precision_weights has no effect: no wider master weights are saved")
    return found


def tensors_to_save(unwrapped: UnwrappedObjects, contents: Contents) -> CheckpointState:
    """Return this rank's tensors for the checkpoint."""
    model, optimizer, given = unwrapped.model, unwrapped.optimizer, contents.optimizer
    state = unwrapped.model_tensors()
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
        narrow = _narrow_weights(unwrapped)
        state = {name: tensor for name, tensor in state.items() if name not in narrow}
    if model is not None and not contents.frozen_weights:
        frozen = frozen_weights_of(model)
        state = {name: tensor for name, tensor in state.items() if name not in frozen}
    if model is not None:
        state = saved_tensors(unwrapped.lora, saved_here(model, state))
    return {**state, **contents.run_tensors}
