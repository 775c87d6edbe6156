"""`save_checkpoint` and `load_checkpoint` as they are documented, on nxd_ckpt: complete or absent, loadable anywhere.

Tensors are stored by their names in the unsharded model, so a checkpoint loads at any tensor-, pipeline- and
data-parallel degrees, with ZeRO-1 or without. What is a checkpoint of the existing library is left to
`legacy_checkpoint`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import nxd_ckpt
from nxd_ckpt import Checkpoint, CheckpointError
from nxd_ckpt.coordinator import coordinator_for, on_every_rank, on_rank_zero
from nxd_layers.lora import LoraModel
from nxd_optim import NeuronZero1Optimizer
from nxd_state import get_mesh, model_parallel_is_initialized
from nxd_state.neuron import extracting_graphs
from torch import nn
from torch.optim import Optimizer

from nxd_trainer.api.adapters import (
    describe_adapter,
    saved_tensors,
    settle_adapters,
    wanted_tensors,
    weights_to_save,
    write_description,
)
from nxd_trainer.api.agreement import agree
from nxd_trainer.api.checkpoint_names import check_names
from nxd_trainer.api.checkpoint_tags import check_kept, choose_tag, find_checkpoint, is_untagged
from nxd_trainer.api.config import accept_aliases
from nxd_trainer.api.folders import on_every_host
from nxd_trainer.api.legacy_checkpoint import load_legacy_checkpoint
from nxd_trainer.api.optimizer_dict import dict_state, holds_dict_state, read_dict_state
from nxd_trainer.api.optimizer_settings import (
    Settings,
    apply_settings,
    gather_settings,
    group_names,
    match_settings,
)
from nxd_trainer.api.pending_save import FINISHING, finalize_checkpoint, keep_newest, note_save
from nxd_trainer.api.replicas import is_first_replica
from nxd_trainer.api.stored_values import holds_value, pack_values, unpack_value
from nxd_trainer.api.unwrap import adapters_of, buffer_names, further_names, plain_model, plain_optimizer
from nxd_trainer.checkpoint import (
    OPTIMIZER_PREFIX,
    CheckpointState,
    allocate_optimizer_state,
    model_state,
    optimizer_state,
    saved_here,
)
from nxd_trainer.lora_checkpoint import OBJECT_KEY

MAX_WORKERS = 32

_SETTINGS = "optimizer_settings"
_SCHEDULER = "scheduler"
_USER_CONTENT = "user_content"


@dataclass(frozen=True)
class _Subjects:
    """What is saved or filled, without wrappers."""

    model: nn.Module | None
    optimizer: Optimizer | None
    lora: LoraModel | None

    @property
    def names(self) -> list[list[str]]:
        """Of the parameters in each of the optimizer's groups."""
        return [] if self.model is None or self.optimizer is None else group_names(self.model, self.optimizer)


@dataclass(frozen=True)
class _Values:
    """What a checkpoint holds besides named tensors, as far as it is wanted."""

    settings: Sequence[Settings] | None
    optimizer_dict: dict[str, Any] | None
    scheduler: Any
    user_content: Any


@accept_aliases(checkpoint_dir_str="path")
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
    *,
    nxd_config: Any = None,
) -> None:
    """Save a checkpoint that is complete or not there at all. Called by all ranks.

    A checkpoint of the same tag is replaced; it stays valid until the new one is complete. A save waits for the one in
    the background before it. `num_workers` and `use_xser` change nothing: every rank writes its own tensors one at a
    time in any case, and the files open with safetensors. Under `neuron_parallel_compile`, where all values are zeros,
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
        _check_workers(num_workers)
        kept = check_kept(num_kept_ckpts)
        subjects = _describe_subjects(model, optimizer, scheduler)
        return {**subjects, "num_kept_ckpts": kept, "async_save": async_save, "zero1_optimizer": zero1_optimizer}

    agree(coordinator, "checking the arguments of save_checkpoint", describe_call)
    root, name = on_rank_zero(coordinator, "choosing the tag of a checkpoint", lambda: choose_tag(path, tag))
    doing = f"preparing checkpoint {name!r}"
    subjects = _subjects(model, optimizer)
    names = on_every_rank(coordinator, doing, lambda: subjects.names, error_type=ValueError)
    settings = gather_settings(names, subjects.optimizer) if subjects.optimizer is not None and names else None
    adapter = describe_adapter(subjects.lora)

    def pack() -> tuple[dict[str, Any], dict[str, bytes]]:
        schedule = None if scheduler is None else scheduler.state_dict()
        return pack_values(
            {_SETTINGS: settings, _SCHEDULER: schedule, _USER_CONTENT: user_content, OBJECT_KEY: adapter}
        )

    objects, extra = on_every_rank(coordinator, doing, pack, error_type=ValueError)

    def finish() -> None:
        write_description(adapter, subjects.lora, root, name)
        if not is_untagged(tag):  # else what lies beside this one is of other runs
            keep_newest(root, check_kept(num_kept_ckpts))

    with weights_to_save(subjects.lora, coordinator, doing):
        state = on_every_rank(
            coordinator,
            doing,
            lambda: _tensors_to_save(subjects, optimizer, zero1=zero1_optimizer),
            error_type=ValueError,
        )
        arguments: dict[str, Any] = {
            "objects": objects,
            "extra": extra,
            "mesh": asdict(get_mesh()) if model_parallel_is_initialized() else None,
            "overwrite": True,
        }
        if async_save:
            note_save(nxd_ckpt.async_save(root, name, state, **arguments), finish)
        else:
            nxd_ckpt.save(root, name, state, **arguments)
    if not async_save:
        on_rank_zero(coordinator, FINISHING, finish)


@accept_aliases(checkpoint_dir_str="path")
def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
) -> Any:
    """Fill what is given from a checkpoint, at any degrees. Called by all ranks.

    Also reads checkpoints of the existing library, see `load_legacy_checkpoint`. An adapter goes into the adapter of a
    model, and may lie there without its base; a model without one goes into the base, and adapters begin anew. Tensors
    of another dtype are converted. An optimizer that is not loaded along with its model may hold master weights of its
    own: call `refresh_master_weights()` of a ZeRO-1 optimizer then.

    Args:
        path: the folder, or URL, that was given to `save_checkpoint`; `checkpoint_dir_str` is another name.
        tag: which checkpoint; None: the newest complete one.
        model: the model to fill.
        optimizer: the optimizer to fill, together with `model`.
        scheduler: its `load_state_dict` is called.
        num_workers: 1 to 32; each rank reads what it needs in any case.
        strict: the checkpoint's model must have the same names as this one. Otherwise what both have is loaded.

    Returns:
        The user content, None if there is none.

    Raises:
        ValueError: an argument is wrong, or not the same on all ranks.
        CheckpointError: there is no such checkpoint, it does not fit, is damaged, or asks to run code; on all ranks.
    """
    coordinator = coordinator_for(None)
    finalize_checkpoint()

    def describe_call() -> dict[str, object]:
        _check_workers(num_workers)
        if isinstance(optimizer, Mapping):
            raise ValueError("optimizer is a dict; give the optimizer itself, which is filled")
        if scheduler is not None and not hasattr(scheduler, "load_state_dict"):
            raise ValueError(f"scheduler is a {type(scheduler).__name__} without load_state_dict; leave it out")
        return {**_describe_subjects(model, optimizer, scheduler), "strict": bool(strict)}

    agree(coordinator, "checking the arguments of load_checkpoint", describe_call)
    found = on_rank_zero(coordinator, f"loading from {path}", lambda: find_checkpoint(path, tag))
    subjects = _subjects(model, optimizer)
    if found.layout != "nxd":
        with on_every_host(found.folder, coordinator) as folder:
            return load_legacy_checkpoint(
                found, folder, subjects.model, subjects.optimizer, scheduler, adapters=subjects.lora, strict=strict
            )
    where, doing = f"checkpoint {found.tag!r} in {found.root}", f"loading checkpoint {found.tag!r} from {found.root}"
    checkpoint = on_every_rank(coordinator, doing, lambda: nxd_ckpt.open_checkpoint(found.root, found.tag))
    wants_scheduler = scheduler is not None
    values = on_every_rank(coordinator, doing, lambda: _read_values(checkpoint, subjects, scheduler=wants_scheduler))
    objects = checkpoint.objects
    into = on_every_rank(
        coordinator, doing, lambda: wanted_tensors(subjects.lora, objects, _model_tensors(subjects), where)
    )
    if strict and subjects.model is not None:
        check_names(checkpoint.tensors, into, further_names(subjects.model), where, coordinator)
    into = {name: tensor for name, tensor in into.items() if name in checkpoint.tensors}
    into |= on_every_rank(coordinator, doing, lambda: _make_room(checkpoint, subjects, values))
    nxd_ckpt.load(found.root, found.tag, into=into, strict=False, convert_dtype=True)
    settle_adapters(subjects.lora, objects)
    on_every_rank(coordinator, doing, lambda: _hand_over(values, subjects, scheduler))
    return values.user_content


def _subjects(model: nn.Module | None, optimizer: object) -> _Subjects:
    return _Subjects(
        None if model is None else plain_model(model),
        plain_optimizer(optimizer) if isinstance(optimizer, Optimizer) else None,
        None if model is None else adapters_of(model),
    )


def _check_workers(num_workers: int) -> None:
    if type(num_workers) is not int or not 1 <= num_workers <= MAX_WORKERS:
        raise ValueError(f"num_workers={num_workers!r} is not a number of workers; use 1 to {MAX_WORKERS}")


def _describe_subjects(model: object, optimizer: object, scheduler: object) -> dict[str, object]:
    """Which there are, once it is sure that they can be saved; no two ranks may differ in it.

    Raises:
        ValueError: one of them is no such thing.
    """
    if not isinstance(model, nn.Module | None):
        raise ValueError(
            f"model is a {type(model).__name__}; give the module itself, whose tensors say how they are cut"
        )
    if not isinstance(optimizer, Optimizer | Mapping | None):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}; give the optimizer, or its state_dict")
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise ValueError(f"scheduler is a {type(scheduler).__name__} without state_dict; give a scheduler or None")
    kind = None if optimizer is None else "a state_dict" if isinstance(optimizer, Mapping) else "an optimizer"
    return {"model": None if model is None else "a model", "optimizer": kind}


def _model_tensors(subjects: _Subjects) -> CheckpointState:
    return {} if subjects.model is None else model_state(subjects.model)


def _tensors_to_save(subjects: _Subjects, optimizer: object, *, zero1: bool) -> CheckpointState:
    state = _model_tensors(subjects)
    if subjects.model is not None and not is_first_replica():  # statistics of batches differ between replicas
        buffers = buffer_names(subjects.model)
        state = {name: tensor for name, tensor in state.items() if name not in buffers}
    if subjects.model is not None and subjects.optimizer is not None:
        state |= optimizer_state(subjects.model, subjects.optimizer)
    elif subjects.optimizer is not None:
        is_zero1 = isinstance(subjects.optimizer, NeuronZero1Optimizer)
        state |= dict_state(subjects.optimizer.state_dict(), zero1=is_zero1)
    elif isinstance(optimizer, Mapping):
        state |= dict_state(optimizer, zero1=zero1)
    return state if subjects.model is None else saved_tensors(subjects.lora, saved_here(subjects.model, state))


def _read_values(checkpoint: Checkpoint, subjects: _Subjects, *, scheduler: bool) -> _Values:
    """All that is no tensor of the model or the optimizer, checked before anything is filled."""
    if scheduler and not holds_value(checkpoint, _SCHEDULER):
        raise CheckpointError("it holds no scheduler; leave out scheduler=")
    settings: list[Settings] | None = None
    optimizer_dict: dict[str, Any] | None = None
    if subjects.optimizer is not None:
        if holds_dict_state(checkpoint):
            optimizer_dict = read_dict_state(checkpoint)
        elif subjects.model is None:
            raise CheckpointError("it holds optimizer states by the names of parameters; give model= as well")
        elif holds_value(checkpoint, _SETTINGS):
            settings = match_settings(unpack_value(checkpoint, _SETTINGS), subjects.names)
        elif not any(name.startswith(OPTIMIZER_PREFIX) for name in checkpoint.tensors):
            raise CheckpointError("it holds no optimizer state; leave out optimizer=")
    return _Values(
        settings,
        optimizer_dict,
        unpack_value(checkpoint, _SCHEDULER) if scheduler else None,
        unpack_value(checkpoint, _USER_CONTENT),
    )


def _make_room(checkpoint: Checkpoint, subjects: _Subjects, values: _Values) -> CheckpointState:
    """The optimizer's tensors, ready to be filled; its own state is gone."""
    if subjects.model is None or subjects.optimizer is None or values.optimizer_dict is not None:
        return {}
    stored = {name: (info.dtype, info.global_shape) for name, info in checkpoint.tensors.items()}
    allocate_optimizer_state(subjects.model, subjects.optimizer, stored)
    return optimizer_state(subjects.model, subjects.optimizer)


def _hand_over(values: _Values, subjects: _Subjects, scheduler: Any) -> None:
    """Give the optimizer and the scheduler what is no tensor of a parameter."""
    if subjects.optimizer is not None and values.optimizer_dict is not None:
        subjects.optimizer.load_state_dict(values.optimizer_dict)
    if subjects.optimizer is not None and values.settings is not None:
        apply_settings(values.settings, subjects.optimizer)
    if scheduler is not None:
        scheduler.load_state_dict(values.scheduler)
