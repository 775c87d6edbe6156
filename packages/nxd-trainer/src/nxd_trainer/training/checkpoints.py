"""Saving a run and going on from a checkpoint, at the same layout or another one."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import nxd_ckpt
from nxd_state import barrier, get_mesh, get_rng_state, get_world_group, seed_model_parallel, set_rng_state
from torch import Tensor

from nxd_trainer.checkpoint import CheckpointState, allocate_optimizer_state, model_state, optimizer_state
from nxd_trainer.recipe import recipe_to_dict
from nxd_trainer.training.run_state import RunState, describe_model


def save_run(state: RunState) -> str:
    """Write a checkpoint of the run under the tag of its step, then drop those that are no longer kept.

    Returns:
        The tag.
    """
    tag = f"step-{state.step:08d}"
    folder = state.recipe.checkpoint_folder
    nxd_ckpt.save(
        folder,
        tag,
        _run_tensors(state) | _own_rng_state(),
        step=state.step,
        objects={
            "mesh": asdict(get_mesh()),
            "model": describe_model(state),
            "recipe": recipe_to_dict(state.recipe),
            "train_loader": state.train_loader.state_dict(),
        },
        overwrite=True,
    )
    if state.recipe.checkpoint.keep and state.is_writer:
        nxd_ckpt.retain(folder, keep_last=state.recipe.checkpoint.keep)
    barrier(get_world_group())
    return tag


def resume_run(state: RunState) -> str | None:
    """Go on from the newest checkpoint, as the recipe's `checkpoint.resume` says.

    Returns:
        The tag gone on from; None if the run begins.

    Raises:
        ValueError: a checkpoint is required and there is none; or none is wanted and there are some, which a new run
            must not mix with; or it is of another model or other data.
    """
    wish = state.recipe.checkpoint.resume
    folder = state.recipe.checkpoint_folder
    newest = nxd_ckpt.latest(folder)
    tag = None if newest is None else newest.tag
    if tag is not None and wish == "never":
        raise ValueError(
            f"checkpoint.resume=never, but {folder} holds checkpoints up to {tag}; choose another output folder or "
            "remove them"
        )
    if tag is None:
        if wish == "required":
            raise ValueError(f"checkpoint.resume=required, but there is no complete checkpoint in {folder}")
        return None
    checkpoint = nxd_ckpt.open_checkpoint(folder, tag)
    _check_model(state, checkpoint.objects, folder / tag)
    allocate_optimizer_state(
        state.model,
        state.optimizer,
        {name: (info.dtype, info.global_shape) for name, info in checkpoint.tensors.items()},
    )
    same_layout = checkpoint.objects["mesh"] == asdict(get_mesh())
    rng_state = _own_rng_state() if same_layout else {}
    nxd_ckpt.load(folder, tag, into=_run_tensors(state) | rng_state, strict=False)
    state.train_loader.load_state_dict(checkpoint.objects["train_loader"])
    state.step = checkpoint.step or 0
    if same_layout:
        _set_own_rng_state(rng_state)
    else:  # the streams of another layout mean nothing here: begin new ones
        seed_model_parallel(state.recipe.train.seed + state.step)
    return tag


def _run_tensors(state: RunState) -> CheckpointState:
    return model_state(state.model) | optimizer_state(state.model, state.optimizer)


def _check_model(state: RunState, objects: dict[str, Any], where: Path) -> None:
    own = describe_model(state)
    differences = [
        f"{name}={value} where the checkpoint has {objects['model'].get(name)}"
        for name, value in own.items()
        if objects["model"].get(name) != value
    ]
    if differences:
        raise ValueError(
            f"{where} is of another model: {', '.join(differences)}; use its sizes, another output folder, "
            "or checkpoint.resume=never"
        )


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
