"""A run's checkpoints: their contents, writing them directly or in the background, and resuming from one.

They use the functions behind `save_checkpoint` and `load_checkpoint`: the run's position is user content, and each
rank's random states are tensors.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import nxd_ckpt
import torch
from nxd_ckpt import Checkpoint, CheckpointError, CheckpointInfo, ShardedTensor
from nxd_engine.checkpoints.contents import Contents
from nxd_engine.checkpoints.load import load_checkpoint
from nxd_engine.checkpoints.save import finalize_checkpoint, is_saving, write_checkpoint
from nxd_engine.checkpoints.state import RNG_PREFIX
from nxd_engine.checkpoints.stored_values import USER_CONTENT, unpack_value
from nxd_engine.logs import get_logger
from nxd_engine.model_description import InitialWeights, ModelDescription, find_description, holds_adapter_alone
from nxd_engine.rank_sync import together
from nxd_state import (
    all_reduce,
    barrier,
    get_mesh,
    get_rng_state,
    get_world_group,
    seed_model_parallel,
    set_rng_state,
    step_boundary,
    transport_device,
)
from torch import Tensor

from nxd_trainer.recipe import Recipe, recipe_to_dict
from nxd_trainer.recipe.resuming import changes_to_tell
from nxd_trainer.training.initial_weights import load_base, load_first_weights, model_differences
from nxd_trainer.training.run_state import EarlyStopping, RunState, on_first_rank_of_each_host
from nxd_trainer.training.weight_average import average_tensors, load_average


class TrainingDiverged(RuntimeError):
    """The loss, a gradient or a weight is no longer a finite number."""


class RunSaver:
    """Saves a run as its recipe's `checkpoint` section says, one checkpoint at a time.

    Args:
        state: the run.
        say: logs a line about each checkpoint.
    """

    def __init__(self, state: RunState, say: Callable[[str], None]) -> None:
        self._state = state
        self._say = say
        self._untold: str | None = None  # tag of a checkpoint that may not be complete yet
        self._num_saves = 0

    def save(self, held_out_loss: float | None) -> None:
        """Write a checkpoint named for the run's step, or start to, once the previous one is complete.

        Call it on all ranks.

        Args:
            held_out_loss: the held-out loss of the current weights, if known.

        Raises:
            TrainingDiverged: a weight is infinite or nan.
            CheckpointError: this or the previous checkpoint could not be written; or the recipe compares replicas, and
                ranks hold different bits of the same weights.
        """
        self.finish()
        check_weights(self._state)
        recipe, tag = self._state.recipe, run_tag(self._state)
        options = recipe.checkpoint
        write_checkpoint(
            recipe.checkpoint_folder,
            tag,
            run_contents(self._state, held_out_loss),
            finish=self._drop_old_ones if options.keep else None,
            in_background=options.background,
            incremental=options.incremental,
            check_replicas=options.check_replicas_every > 0 and self._num_saves % options.check_replicas_every == 0,
        )
        self._num_saves += 1
        self._untold = tag
        self.poll()

    def poll(self) -> None:
        """Report the checkpoint if it is complete. Does not raise, as ranks may notice at different steps."""
        if self._untold is not None and not is_saving():
            self._say(f"saved {self._state.recipe.checkpoint_folder / self._untold}")
            self._untold = None

    def finish(self) -> None:
        """Wait until the current write is complete. Call it on all ranks.

        Raises:
            CheckpointError: the write failed; on every rank.
        """
        untold, self._untold = self._untold, None
        finalize_checkpoint()
        self._untold = untold
        self.poll()

    def close(self) -> None:
        """Like `finish`, and free the resources of background saves; the folder is then final. Call it on all ranks."""
        try:
            self.finish()
        finally:
            nxd_ckpt.end_async_saves()
        barrier(get_world_group())

    def _drop_old_ones(self) -> None:
        options = self._state.recipe.checkpoint
        nxd_ckpt.retain(
            self._state.recipe.checkpoint_folder,
            keep_last=options.keep,
            keep_every=options.keep_every or None,
            keep_best=options.keep_best,
            metric="held_out_loss" if options.keep_best else None,
        )


def run_tag(state: RunState) -> str:
    """Return the name of a checkpoint of the run at its current step."""
    return f"step-{state.step:08d}"


def run_contents(state: RunState, held_out_loss: float | None = None, *, stands_alone: bool = True) -> Contents:
    """Return everything that a run resumes from.

    Args:
        state: the run.
        held_out_loss: the held-out loss of the current weights, if known.
        stands_alone: whether to include the files that other readers of the checkpoint need.
    """
    tensors: dict[str, Any] = {**_own_rng_state(), **_own_average(state)}
    return Contents(
        state.model,
        state.optimizer,
        user_content=_describe_run(state),
        with_settings=False,  # the recipe's settings apply
        description=state.description if stands_alone else replace(state.description, files={}),
        run_tensors=tensors,
        step=state.step,
        metrics={} if held_out_loss is None else {"held_out_loss": held_out_loss},
    )


def resume_run(state: RunState) -> str | None:
    """Resume from the newest checkpoint, as the recipe's `checkpoint.resume` says.

    Returns:
        A label of the checkpoint; None if the run starts from scratch, or with the weights that the recipe names.

    Raises:
        ValueError: a checkpoint is required but there is none; or `resume` is "never" but the folder holds checkpoints,
            which a new run must not mix with; or the checkpoint has a different model or data.
    """
    wish = state.recipe.checkpoint.resume
    folder = state.recipe.checkpoint_folder
    newest = newest_on_disk(state.recipe)
    tag = None if newest is None else newest.tag
    if tag is not None and wish == "never":
        raise ValueError(
            f"checkpoint.resume=never, but {folder} holds checkpoints up to {tag}; choose another output folder or "
            "remove them"
        )
    if tag is None:
        if wish == "required":
            raise ValueError(f"checkpoint.resume=required, but there is no complete checkpoint in {folder}")
        load_first_weights(state)
        if state.average is not None:
            state.average.restart()
        return None
    resume_from(state, folder, tag)
    return tag


def resume_from(state: RunState, root: Path | str, tag: str) -> None:
    """Restore a run from a checkpoint. Call it on all ranks.

    Raises:
        ValueError: the checkpoint has a different model or data.
        CheckpointError: the checkpoint is damaged; on all ranks.
    """
    checkpoint = together(f"open {root}/{tag}", lambda: nxd_ckpt.open_checkpoint(root, tag), error_type=CheckpointError)
    where = f"{root}/{tag}"
    content = _run_content(checkpoint, where)
    is_merged = content["recipe"].get("lora", {}).get("save") == "merged"
    if is_merged and state.recipe.lora.save == "merged":
        raise ValueError(
            f"{where} holds weights with the adapter merged into them (lora.save=merged), which cannot be resumed; "
            "choose another output folder. Runs with lora.save=adapter or both can resume"
        )
    description = find_description(checkpoint)
    needs_base = holds_adapter_alone(checkpoint)
    _check_same_run(state, description, content, where, needs_base=needs_base)
    own, initial = state.description.initial, None if description is None else description.initial
    if initial is not None and (own is None or own.fingerprint != initial.fingerprint):
        state.description = replace(state.description, initial=initial)
    if needs_base:
        load_base(state)
    changes = changes_to_tell(state.recipe, content["recipe"])
    if changes:
        told = f"keys have changed since {where} was written: {'; '.join(changes)}"
        get_logger("nxd_trainer").warning(told)
    load_checkpoint(root, tag, model=state.model, optimizer=state.optimizer)
    if state.average is not None and not load_average(state.average, state.model, checkpoint, root):
        get_logger("nxd_trainer").warning(
            f"{where} has no average of the weights; the average starts from its weights (train.ema_decay)"
        )
    state.train_loader.load_state_dict(content["train_loader"])
    state.early_stopping.load_state_dict(content.get("early_stopping", EarlyStopping(0, 0.0).state_dict()))
    state.optimizer.load_precision_state(content.get("precision", {}))
    state.step = checkpoint.step or 0
    rng_state = _own_rng_state()
    if checkpoint.mesh == asdict(get_mesh()) and rng_state.keys() <= checkpoint.tensors.keys():
        nxd_ckpt.load(root, tag, into=rng_state, strict=False)
        _set_own_rng_state(rng_state)
    else:  # random states of another layout or device type do not apply: start new ones
        seed_model_parallel(state.recipe.train.seed + state.step)


def newest_on_disk(recipe: Recipe) -> CheckpointInfo | None:
    """Find the newest checkpoint in the run's folder. Call it on all ranks.

    Raises:
        ValueError: one of the checkpoints is damaged; the user must decide whether to resume from an older one.
    """

    def find() -> CheckpointInfo | None:
        try:
            return nxd_ckpt.latest(recipe.checkpoint_folder)
        except CheckpointError as damage:
            raise ValueError(f"{damage}; remove that folder to resume without it") from damage

    return on_first_rank_of_each_host(find)


def _describe_run(state: RunState) -> dict[str, object]:
    """Return a checkpoint's contents besides tensors: the run's description and its position in the data."""
    return {
        "step": state.step,
        "recipe": recipe_to_dict(state.recipe),
        "data": _describe_data(state),
        "train_loader": state.train_loader.state_dict(),
        "early_stopping": state.early_stopping.state_dict(),
        "precision": state.optimizer.precision_state(),
    }


def _describe_data(state: RunState) -> dict[str, object]:
    """Return the inputs that determine the run's tokens and their split."""
    options = state.recipe.data
    fraction = 0.0 if options.evaluation_path is not None else options.held_out_fraction
    return {"digest": state.data.digest, "held_out_fraction": fraction}


def _run_content(checkpoint: Checkpoint, where: str) -> dict[str, Any]:
    """Read the run's data besides tensors from its checkpoint; old checkpoints do not keep them as user content.

    Raises:
        ValueError: the checkpoint was not written by a run.
    """
    content = unpack_value(checkpoint, USER_CONTENT) or checkpoint.objects
    if not isinstance(content, dict) or not {"recipe", "data", "train_loader"} <= content.keys():
        root = os.path.dirname(where)
        raise ValueError(
            f"{where} is not a checkpoint of nxd train: it has no position in the data. To start a run from its "
            f"weights, choose another output folder and set checkpoint.initial_weights={root}"
        )
    return content


def _check_same_run(
    state: RunState, description: ModelDescription | None, content: dict[str, Any], where: str, *, needs_base: bool
) -> None:
    """Raise ValueError if the checkpoint has a different model, precision, text or adapters."""
    recipe = recipe_to_dict(state.recipe)
    own: dict[str, dict[str, object]] = {"data": _describe_data(state), "train": {"dtype": state.recipe.train.dtype}}
    theirs = {**content["recipe"], "data": content["data"]}
    theirs["lora"] = recipe_to_dict(Recipe())["lora"] | theirs.get("lora", {})  # older runs lack some of these keys
    own["optimizer"] = {name: recipe["optimizer"].get(name) for name in ("type", "factory")}
    theirs["optimizer"] = {"type": "adamw", **theirs.get("optimizer", {})}  # older runs lack the type
    may_change = ("save",) if theirs["lora"].get("save") != "merged" else ()
    lora = {name: value for name, value in recipe["lora"].items() if name not in may_change}
    own["lora"] = lora if state.recipe.lora.rank else {"rank": 0}
    theirs["dpo"] = recipe_to_dict(Recipe())["dpo"] | theirs.get("dpo", {})
    own["dpo"] = recipe["dpo"]
    initial = None if description is None else description.initial
    # Adapters and preferences depend on the initial weights.
    saves_adapter = state.recipe.lora.rank > 0 and state.recipe.lora.save == "adapter"
    needs_initial = needs_base or saves_adapter or state.recipe.dpo.beta > 0
    if needs_initial and initial is None:
        own["train"]["seed"] = state.recipe.train.seed
        own["checkpoint"] = {"initial_weights": recipe["checkpoint"].get("initial_weights")}
        own["model"] = {"path": recipe["model"].get("path")}
    differences = [
        f"{section}.{name} is {value}, the checkpoint has {theirs[section].get(name)}"
        for section, values in own.items()
        for name, value in values.items()
        if theirs[section].get(name) != value
    ]
    other = description or ModelDescription({})
    if needs_initial and initial is not None and not _can_be_found(initial, state.description.initial):
        told = state.description.initial or "not in the place that the recipe names"
        differences.append(f"the initial weights are {told}, the checkpoint has those of {initial}")
    differences = model_differences(state.description, other, "the checkpoint has") + differences
    if differences:
        raise ValueError(
            f"{where} belongs to another run: {'; '.join(differences)}. Restore that, or use another output folder"
        )


def _can_be_found(theirs: InitialWeights, own: InitialWeights | None) -> bool:
    """Whether a run can find the weights that a checkpoint needs: its own, or another checkpoint beside its own."""
    if own is None:
        return False
    return theirs.fingerprint == own.fingerprint or (theirs.tag is not None and theirs.folder == own.folder)


def check_weights(state: RunState) -> None:
    """Before a save, raise TrainingDiverged on every rank if a weight on any rank is infinite or nan."""
    finite = torch.stack([parameter.isfinite().all() for parameter in state.model.parameters()]).all().float()
    step_boundary()
    world = get_world_group()
    if not bool(all_reduce(finite.to(transport_device(world)), world, op="min")):
        raise diverged(state, f"a weight is infinite or nan after step {state.step}")


def diverged(state: RunState, what: str) -> TrainingDiverged:
    """Return the error of a run that can only resume from its last checkpoint."""
    complete = nxd_ckpt.list_checkpoints(state.recipe.checkpoint_folder)
    advice = f"resume from {state.recipe.checkpoint_folder / complete[-1].tag}" if complete else "start over"
    return TrainingDiverged(f"{what}; lower optimizer.lr or lengthen optimizer.warmup_steps, and {advice}")


def _own_average(state: RunState) -> dict[str, ShardedTensor]:
    return {} if state.average is None else average_tensors(state.average, state.model)


def _own_rng_state() -> dict[str, Tensor]:
    """Return this rank's random states as tensors, under rank-specific names."""
    rank = get_world_group().rank
    return {
        f"{RNG_PREFIX}rank-{rank:05d}/{stream}/{kind}": tensor
        for stream, states in get_rng_state().items()
        for kind, tensor in states.items()
    }


def _set_own_rng_state(tensors: dict[str, Tensor]) -> None:
    streams: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        _, _, stream, kind = name.split("/")
        streams.setdefault(stream, {})[kind] = tensor
    set_rng_state(streams)
