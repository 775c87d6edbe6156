"""What a checkpoint of a run holds, and going on from one, at the same layout or another one."""

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nxd_ckpt
import torch
from nxd_state import (
    all_reduce,
    get_mesh,
    get_rng_state,
    get_world_group,
    seed_model_parallel,
    set_rng_state,
    step_boundary,
    transport_device,
)
from torch import Tensor

from nxd_trainer.checkpoint import CheckpointState, allocate_optimizer_state, model_state, optimizer_state, saved_here
from nxd_trainer.recipe import recipe_to_dict
from nxd_trainer.training.initial_weights import load_initial_weights
from nxd_trainer.training.run_state import RunState, describe_model


class TrainingDiverged(RuntimeError):
    """The loss, a gradient or a weight is no longer a finite number."""


def tensors_to_save(state: RunState) -> CheckpointState:
    """What this rank gives to a checkpoint of the run; it shares the run's memory."""
    return saved_here(state.model.pipeline, _run_tensors(state)) | _own_rng_state()


def describe_run(state: RunState) -> dict[str, object]:
    """What goes into a checkpoint beside tensors: what the run is, and where in its data it stands."""
    return {
        "mesh": asdict(get_mesh()),
        "model": describe_model(state),
        "data": _describe_data(state),
        "end_of_document": state.tokenizer.end_of_document,
        "recipe": recipe_to_dict(state.recipe),
        "train_loader": state.train_loader.state_dict(),
    }


def resume_run(state: RunState) -> str | None:
    """Go on from the newest checkpoint, as the recipe's `checkpoint.resume` says.

    Returns:
        The tag gone on from; None if the run begins, with `checkpoint.initial_weights` where these are set.

    Raises:
        ValueError: a checkpoint is required and there is none; or none is wanted and there are some, which a new run
            must not mix with; or it is of another model or other data.
    """
    wish = state.recipe.checkpoint.resume
    folder = state.recipe.checkpoint_folder
    tag = _newest_tag(folder)
    if tag is not None and wish == "never":
        raise ValueError(
            f"checkpoint.resume=never, but {folder} holds checkpoints up to {tag}; choose another output folder or "
            "remove them"
        )
    if tag is None:
        if wish == "required":
            raise ValueError(f"checkpoint.resume=required, but there is no complete checkpoint in {folder}")
        if state.recipe.checkpoint.initial_weights is not None:
            load_initial_weights(state, state.recipe.checkpoint.initial_weights)
        return None
    checkpoint = nxd_ckpt.open_checkpoint(folder, tag)
    _check_same_run(state, checkpoint.objects, folder / tag)
    allocate_optimizer_state(
        state.model.pipeline,
        state.optimizer.optimizer,
        {name: (info.dtype, info.global_shape) for name, info in checkpoint.tensors.items()},
    )
    rng_state = _own_rng_state()
    same_streams = checkpoint.objects["mesh"] == asdict(get_mesh()) and rng_state.keys() <= checkpoint.tensors.keys()
    rng_state = rng_state if same_streams else {}
    nxd_ckpt.load(folder, tag, into=_run_tensors(state) | rng_state, strict=False)
    state.train_loader.load_state_dict(checkpoint.objects["train_loader"])
    state.step = checkpoint.step or 0
    if same_streams:
        _set_own_rng_state(rng_state)
    else:  # the streams of another layout or kind of device mean nothing here: begin new ones
        seed_model_parallel(state.recipe.train.seed + state.step)
    return tag


def _run_tensors(state: RunState) -> CheckpointState:
    return model_state(state.model.pipeline) | optimizer_state(state.model.pipeline, state.optimizer.optimizer)


def _newest_tag(folder: Path) -> str | None:
    """Tag of the newest checkpoint.

    Raises:
        ValueError: one of the checkpoints is damaged: going on from an older one, or anew, is not for us to choose.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            newest = nxd_ckpt.latest(folder)
        except UserWarning as damage:
            raise ValueError(f"{damage}; remove that folder to go on without it") from damage
    return None if newest is None else newest.tag


def _describe_data(state: RunState) -> dict[str, object]:
    """What the run's tokens and their split depend on."""
    return {"digest": state.corpus.digest, "held_out_fraction": state.recipe.data.held_out_fraction}


def _check_same_run(state: RunState, objects: dict[str, Any], where: Path) -> None:
    """Raise ValueError if the checkpoint is of another model, precision or text."""
    own: dict[str, dict[str, object]] = {
        "model": describe_model(state),
        "data": _describe_data(state),
        "train": {"dtype": state.recipe.train.dtype},
    }
    theirs = {**objects, "train": objects["recipe"]["train"]}
    differences = [
        f"{section}.{name} is {value}, the checkpoint has {theirs[section].get(name)}"
        for section, values in own.items()
        for name, value in values.items()
        if theirs[section].get(name) != value
    ]
    if differences:
        raise ValueError(
            f"{where} is of another run: {'; '.join(differences)}. Restore that, or take another output folder"
        )


def check_weights(state: RunState) -> None:
    """Raise TrainingDiverged on every rank if a weight on any of them is infinite or nan: before it is saved."""
    finite = torch.stack([parameter.isfinite().all() for parameter in state.model.parameters()]).all().float()
    step_boundary()
    world = get_world_group()
    if not bool(all_reduce(finite.to(transport_device(world)), world, op="min")):
        raise diverged(state, f"a weight is infinite or nan after step {state.step}")


def diverged(state: RunState, what: str) -> TrainingDiverged:
    """The error of a run that can only go on from its last checkpoint."""
    newest = nxd_ckpt.latest(state.recipe.checkpoint_folder)
    advice = "start again" if newest is None else f"go on from {state.recipe.checkpoint_folder / newest.tag}"
    return TrainingDiverged(f"{what}; lower optimizer.lr or lengthen optimizer.warmup_steps, and {advice}")


def _own_rng_state() -> dict[str, Tensor]:
    """This rank's random streams as tensors, under names of its own."""
    rank = get_world_group().rank
    return {
        f"rng/rank-{rank:05d}/{stream}/{kind}": tensor
        for stream, states in get_rng_state().items()
        for kind, tensor in states.items()
    }


def _set_own_rng_state(tensors: dict[str, Tensor]) -> None:
    streams: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        _, _, stream, kind = name.split("/")
        streams.setdefault(stream, {})[kind] = tensor
    set_rng_state(streams)
