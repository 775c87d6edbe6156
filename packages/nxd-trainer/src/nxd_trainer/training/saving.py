"""Saves a run's checkpoints: to disk, directly or in the background, and to host memory for elastic runs.

They use the functions behind `save_checkpoint`: the run's position is user content, and each rank's random states are
tensors. Checkpoints in host memory have the same contents, are written often, and are lost when the job ends.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import nxd_ckpt
import torch
from nxd_ckpt import CheckpointError, Shard, ShardedTensor
from nxd_ckpt.errors import RanksLostError
from nxd_elastic.peers.store import job_url
from nxd_engine import NxDModel
from nxd_engine.checkpoints.contents import Contents
from nxd_engine.checkpoints.merged_weights import average_name
from nxd_engine.checkpoints.save import finalize_checkpoint, is_saving, write_checkpoint
from nxd_engine.checkpoints.state import RNG_PREFIX, logical_name, parameters_in_checkpoint
from nxd_engine.unwrap import plain_model
from nxd_optim import WeightAverage
from nxd_state import (
    all_reduce,
    barrier,
    get_rng_state,
    get_world_group,
    local_values,
    step_boundary,
    transport_device,
)
from nxd_state.parameter_marks import is_tied_copy
from torch import Tensor

from nxd_trainer.recipe import Recipe, recipe_to_dict
from nxd_trainer.report import StepRecord
from nxd_trainer.training.run_state import RunState


class TrainingDiverged(RuntimeError):
    """The loss, a gradient or a weight is no longer a finite number."""


def describe_checkpoints(recipe: Recipe, records: Iterable[StepRecord]) -> str:
    """Return the folder of a run's checkpoints, and whether the one with the lowest held-out loss is missing."""
    losses = [(it.held_out_loss, it.step) for it in records if it.held_out_loss is not None]
    finite = [(loss, step) for loss, step in losses if math.isfinite(loss)]
    try:
        kept = {it.step for it in nxd_ckpt.list_checkpoints(recipe.checkpoint_folder)}
    except CheckpointError:  # an older one is damaged, which is for the next run to report
        return str(recipe.checkpoint_folder)
    if not finite or min(finite)[1] in kept:
        return str(recipe.checkpoint_folder)
    return (
        f"{recipe.checkpoint_folder}, without step {min(finite)[1]}, the best: checkpoint.keep_best=1 keeps the best "
        "of those that checkpoint.save_every saves"
    )


class RunSaver:
    """Saves a run as its recipe's `checkpoint` section says, one checkpoint at a time.

    Args:
        state: the run.
        say: function that logs a line about each checkpoint.
    """

    def __init__(self, state: RunState, say: Callable[[str], None]) -> None:
        self._state = state
        self._say = say
        self._unreported: str | None = None  # tag of a checkpoint that may not be complete yet
        self._num_saves = 0

    def save(self, held_out_loss: float | None) -> None:
        """Write a checkpoint named for the run's step, or start to, once the previous one is complete.

        Call it on all ranks, with the held-out loss of the current weights, if known.

        Raises:
            TrainingDiverged: a weight is infinite or nan.
            CheckpointError: this or the previous checkpoint could not be written; or the recipe compares replicas, and
                ranks hold different bits of the same weights.
        """
        self.finish()
        check_weights(self._state)
        folder, tag = self._state.recipe.checkpoint_folder, run_tag(self._state)
        options = self._state.recipe.checkpoint
        write_checkpoint(
            folder,
            tag,
            run_contents(self._state, held_out_loss),
            finish=self._remove_old_ones if options.keep else None,
            in_background=options.background,
            incremental=options.incremental,
            check_replicas=options.check_replicas_every > 0 and self._num_saves % options.check_replicas_every == 0,
        )
        self._num_saves += 1
        self._unreported = tag
        self.poll()

    def poll(self) -> None:
        """Report the checkpoint if it is complete. Does not raise, as ranks may notice at different steps."""
        if self._unreported is not None and not is_saving():
            self._say(f"saved {self._state.recipe.checkpoint_folder / self._unreported}")
            self._unreported = None

    def finish(self) -> None:
        """Wait until the current write is complete. Call it on all ranks.

        Raises:
            CheckpointError: the write failed; on every rank.
        """
        unreported, self._unreported = self._unreported, None
        finalize_checkpoint()
        self._unreported = unreported
        self.poll()

    def close(self) -> None:
        """Like `finish`, and free the resources of background saves; the folder is then final. Call it on all ranks."""
        try:
            self.finish()
        finally:
            nxd_ckpt.end_async_saves()
        barrier(get_world_group())

    def _remove_old_ones(self) -> None:
        options = self._state.recipe.checkpoint
        nxd_ckpt.retain(
            self._state.recipe.checkpoint_folder,
            keep_last=options.keep,
            keep_every=options.keep_every or None,
            keep_best=options.keep_best,
            metric="held_out_loss" if options.keep_best else None,
        )


class MemorySaver:
    """Saves to host memory in the background, as the recipe's `checkpoint.memory_every` says; the newest one is kept.

    Args:
        state: the run.
        warn: function that logs a line about a checkpoint that could not be written; the run continues.

    Raises:
        ValueError: the recipe asks for such checkpoints, but no host has a memory server.
    """

    def __init__(self, state: RunState, warn: Callable[[str], None]) -> None:
        self._state = state
        self._warn = warn
        self._url = memory_url(state.recipe)
        self._is_writing = False

    def save(self) -> None:
        """Start to write a checkpoint of the current state. Call it on all ranks, when nothing is being written.

        Raises:
            TrainingDiverged: a weight is not finite; the last checkpoint is kept.
        """
        url = self._url
        assert url is not None
        check_weights(self._state)
        write_checkpoint(
            url,
            run_tag(self._state),
            run_contents(self._state, stands_alone=False),  # only this run reads it
            finish=lambda: _keep_newest(url),
            in_background=True,
        )
        self._is_writing = True

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Call it on all ranks.

        Raises:
            RanksLostError: a rank is lost.
        """
        if not self._is_writing:
            return
        self._is_writing = False
        try:
            finalize_checkpoint()
        except RanksLostError:
            raise
        except CheckpointError as error:  # such as full memory; the same on all ranks
            self._warn(f"no checkpoint in the memory of hosts: {error}")


def _keep_newest(url: str) -> None:
    nxd_ckpt.retain(url, keep_last=1)


def memory_url(recipe: Recipe) -> str | None:
    """Return the path of a run's checkpoints in host memory; None if the recipe asks for none.

    Raises:
        ValueError: the recipe asks for them, but no host has a memory server.
    """
    options = recipe.checkpoint
    if not options.memory_every:
        return None
    url = job_url(options.memory_copies)
    if url is None:
        raise ValueError(
            f"checkpoint.memory_every={options.memory_every}, but no host of this run keeps checkpoints in memory: "
            "add --elastic, which enables that, or leave it out"
        )
    return url


def run_tag(state: RunState) -> str:
    """Return the name of a checkpoint of the run at its current step."""
    return f"step-{state.step:08d}"


def run_contents(state: RunState, held_out_loss: float | None = None, *, stands_alone: bool = True) -> Contents:
    """Return everything that a run resumes from; `stands_alone` adds the files that other readers need."""
    average = {} if state.average is None else average_tensors(state.average, state.model)
    tensors: dict[str, Any] = {**own_rng_state(), **average}
    return Contents(
        state.model,
        state.optimizer,
        user_content={
            "step": state.step,
            "recipe": recipe_to_dict(state.recipe),
            "data": describe_data(state),
            "train_loader": state.train_loader.state_dict(),
            "early_stopping": state.early_stopping.state_dict(),
            "precision": state.optimizer.precision_state(),
        },
        with_settings=False,  # the recipe's settings apply
        description=state.description if stands_alone else replace(state.description, files={}),
        run_tensors=tensors,
        step=state.step,
        metrics={} if held_out_loss is None else {"held_out_loss": held_out_loss},
    )


def describe_data(state: RunState) -> dict[str, Any]:
    """Return the inputs that determine the run's tokens and their split, and the digest of each source, to name it."""
    options = state.recipe.data
    fraction = 0.0 if options.evaluation_path is not None else options.held_out_fraction
    sources = {name: source.index.digest for name, source in state.data.sources.items()}
    return {"digest": state.data.digest, "held_out_fraction": fraction, "sources": sources}


def own_rng_state() -> dict[str, Tensor]:
    """Return this rank's random states as tensors, under rank-specific names."""
    rank = get_world_group().rank
    return {
        f"{RNG_PREFIX}rank-{rank:05d}/{stream}/{kind}": tensor
        for stream, states in get_rng_state().items()
        for kind, tensor in states.items()
    }


def average_tensors(average: WeightAverage, model: NxDModel, *, with_copies: bool = False) -> dict[str, ShardedTensor]:
    """Return this rank's part of the moving average of the weights, as logical tensors that share its memory.

    `with_copies` includes further copies of a tied weight, which are loaded but not saved.
    """
    names: Mapping[Tensor, str] = {parameter: name for name, parameter in parameters_in_checkpoint(plain_model(model))}
    shards: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for state in average.sharded_state():
        if is_tied_copy(state.parameter) and not with_copies:
            continue
        for shard in state.shards:
            name = average_name(logical_name(names[state.parameter], shard.name))
            shards.setdefault((name, shard.logical_shape), []).append(Shard(shard.tensor, shard.box.offset))
    return {name: ShardedTensor(shape, found) for (name, shape), found in shards.items()}


def check_weights(state: RunState) -> None:
    """Before a save, raise TrainingDiverged on every rank if a weight on any rank is infinite or nan."""
    finite = torch.stack([local_values(it).isfinite().all() for it in state.model.parameters()]).all().float()
    step_boundary()
    world = get_world_group()
    if not bool(all_reduce(finite.to(transport_device(world)), world, op="min")):
        raise diverged(state, f"a weight is infinite or nan after step {state.step}")


def diverged(state: RunState, what: str) -> TrainingDiverged:
    """Return the error of a run that can only resume from its last checkpoint."""
    complete = nxd_ckpt.list_checkpoints(state.recipe.checkpoint_folder)
    advice = f"resume from {state.recipe.checkpoint_folder / complete[-1].tag}" if complete else "start over"
    return TrainingDiverged(f"{what}; lower optimizer.lr or lengthen optimizer.warmup_steps, and {advice}")
