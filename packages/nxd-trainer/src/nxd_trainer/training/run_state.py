"""The state of a training run on one rank, built from a recipe."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, TypeVar

from nxd_data import HeldOutLoader, StreamLoader, TrainBatches, TrainLoader
from nxd_engine import NxDModel, NxDOptimizer
from nxd_engine.adapters import check_can_be_merged
from nxd_engine.checkpoints.model_description import ModelDescription
from nxd_engine.hugging_face import text_config
from nxd_engine.rank_sync import run_or_raise_peer_error
from nxd_optim import WeightAverage
from nxd_state import (
    all_gather_object,
    get_group,
    get_mesh,
    get_world_group,
    is_lazy_device,
)

from nxd_trainer.dpo import REFERENCE
from nxd_trainer.from_recipe import build_model, recipe_model
from nxd_trainer.optimizers import build_optimizer
from nxd_trainer.recipe import Recipe, check_layout
from nxd_trainer.recipe.sections import LoraSection
from nxd_trainer.report import Tracker
from nxd_trainer.training.run_data import RunData, open_data, prepare_data, with_counted_steps
from nxd_trainer.training.run_origin import find_origin
from nxd_trainer.vision_inputs import check_images_are_read

T = TypeVar("T")


@dataclass
class EarlyStopping:
    """Ends a run whose held-out loss no longer falls."""

    patience: int  # evaluations in a row without a lower loss after which the run ends; 0: never
    threshold: float  # minimum decrease of the loss that counts
    best_loss: float = math.inf  # lowest loss so far
    num_without_gain: int = 0  # evaluations since then

    @property
    def is_due(self) -> bool:
        """Whether the run should end."""
        return 0 < self.patience <= self.num_without_gain

    def add(self, held_out_loss: float) -> None:
        """Count an evaluation."""
        if held_out_loss < self.best_loss - self.threshold:
            self.best_loss, self.num_without_gain = held_out_loss, 0
        else:
            self.num_without_gain += 1

    def state_dict(self) -> dict[str, float | int | None]:
        """Return the state for a checkpoint: finite numbers, and None before the first loss."""
        best_loss = self.best_loss if math.isfinite(self.best_loss) else None
        return {"best_loss": best_loss, "num_without_gain": self.num_without_gain}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the values of `state_dict`."""
        best_loss = state_dict["best_loss"]
        self.best_loss = math.inf if best_loss is None else float(best_loss)
        self.num_without_gain = int(state_dict["num_without_gain"])


@dataclass
class RunState:
    """The state of a training run on one rank: first what is fixed, then what changes as it trains."""

    recipe: Recipe
    description: ModelDescription  # the model's description, for checkpoints
    input_names: Sequence[str]  # names of the model's inputs
    model: NxDModel
    optimizer: NxDOptimizer
    data: RunData  # the run's data
    held_out_loader: HeldOutLoader
    # for preferences, the model before the run; None without preferences, or if the model without its adapters is the
    # reference
    reference: NxDModel | None
    output_lock: IO[str] | None  # keeps other runs out of the output folder while this object lives

    train_loader: TrainLoader | StreamLoader  # the data loader, with the position in the data
    train_batches: TrainBatches  # the loader's batches on the device
    early_stopping: EarlyStopping  # count of the evaluations without a lower held-out loss
    average: WeightAverage | None  # moving average of the weights; None without `train.ema_decay`
    step: int = 0  # optimizer steps taken since the run began, over all invocations
    # trackers that get the metrics besides their file, opened at the step that a run resumes from; only on the rank
    # that writes metrics
    trackers: Sequence[Tracker] = ()
    # level, source and message of this rank's warnings while the run was prepared, for its log
    early_warnings: Sequence[tuple[str, str, str]] = ()

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes metrics and shows progress."""
        return get_world_group().rank == 0

    @property
    def layout(self) -> str:
        """The layout, such as "TP 2 x DP 2"; see `ParallelDegrees.describe`."""
        return replace(self.recipe.parallel.degrees, dp=get_mesh().dp).describe()


def build_run_state(recipe: Recipe, *, output_lock: IO[str] | None = None) -> RunState:
    """Build the data, model and optimizer of a run at step 0. The mesh must be initialized.

    Args:
        recipe: the recipe.
        output_lock: the lock of the output folder, if it is held.

    Raises:
        ValueError: the recipe does not fit the layout, or the data cannot be used; the same error on every rank.
    """
    data_parallel = get_group("dp")
    source = run_or_raise_peer_error("determining the model", lambda: recipe_model(recipe), error_type=ValueError)
    of_text = text_config(source.description.config)
    vocab_size = of_text.get("vocab_size")
    check_layout(recipe, data_parallel.size, vocab_size=vocab_size)
    origin = on_first_rank_of_each_host(lambda: find_origin(recipe, {**of_text, **source.description.config}))
    prepared = on_first_rank_of_each_host(lambda: prepare_data(recipe, vocab_size=vocab_size))
    data = open_data(recipe, prepared)
    check_images_are_read(source.vision, data.with_images)
    data.notes.extend([*source.notes, *origin.notes])
    recipe = with_counted_steps(recipe, data.train)
    built = recipe
    if recipe.lora.rank and recipe.lora.save == "adapter" and origin.initial is None:
        data.notes.append(
            "checkpoints also hold the base model (lora.save=both), whose weights are not stored anywhere else"
        )
        built = replace(recipe, lora=replace(recipe.lora, save="both"))
    sizes: dict[str, int] = {
        "global_batch_size": recipe.train.global_batch_size,
        "gradient_accumulation_steps": recipe.train.gradient_accumulation_steps,
        "dp_rank": data_parallel.rank,
        "dp_size": data_parallel.size,
    }
    images = source.vision.processor
    train_loader: TrainLoader | StreamLoader
    if data.stream is None:
        train_loader = TrainLoader(data.train, seed=recipe.train.seed, image_processor=images, **sizes)
    else:
        train_loader = StreamLoader(data.stream, seed=recipe.train.seed, **sizes)
    held_out_loader = HeldOutLoader(
        data.held_out, num_batches=recipe.train.eval_batches, image_processor=images, **sizes
    )
    model = build_model(built, source)
    run_or_raise_peer_error("checking the adapters", lambda: check_can_be_merged(model), error_type=ValueError)
    reference = _build_reference(recipe) if recipe.dpo.beta else None
    return RunState(
        recipe=recipe,
        description=replace(source.description, initial=origin.initial, files=origin.files),
        input_names=source.input_names,
        model=model,
        optimizer=build_optimizer(recipe, model),
        data=data,
        held_out_loader=held_out_loader,
        reference=reference,
        output_lock=output_lock,
        train_loader=train_loader,
        train_batches=TrainBatches(train_loader),
        early_stopping=EarlyStopping(recipe.train.early_stopping_patience, recipe.train.early_stopping_threshold),
        average=_build_average(recipe, model),
    )


def _build_reference(recipe: Recipe) -> NxDModel | None:
    """Build the reference model of preferences, without weights; None if the trained model without adapters is it."""
    # A traced pipeline always computes the loss that it was traced with, so it cannot return log-probabilities.
    if recipe.lora.rank and (recipe.parallel.pipeline_parallel_size == 1 or not recipe.model.is_own_llama):
        return None
    plain = replace(recipe, lora=LoraSection(), pipeline=replace(recipe.pipeline, trace_file=None))
    source = recipe_model(plain)
    names = [name for name in source.input_names if name != REFERENCE]
    model = build_model(plain, replace(source, input_names=names))
    model.requires_grad_(False)
    return model


def _build_average(recipe: Recipe, model: NxDModel) -> WeightAverage | None:
    """Return the moving average of the weights that a recipe asks for, which starts from the current weights."""
    decay = recipe.train.ema_decay
    if not decay:
        return None
    if is_lazy_device():  # each replica averages another part, so ranks would record different graphs
        raise ValueError(f"train.ema_decay={decay:g} does not support XLA; set train.ema_decay=0")
    return WeightAverage(model.parameters(), decay)


def on_first_rank_of_each_host(make: Callable[[], T]) -> T:
    """Call `make` on one rank of each host while the others wait; all get its value.

    Raises:
        Exception: the error of `make` on any host; on every rank.
    """
    outcome: tuple[list[T], Exception | None] = ([], None)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            outcome = ([make()], None)
        except Exception as error:  # sent to every rank, which raises it again
            outcome = ([], error)
    outcomes = all_gather_object(outcome, get_world_group())
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return next(value for values, _ in outcomes for value in values)
