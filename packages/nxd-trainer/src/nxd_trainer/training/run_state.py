"""Everything a training run holds on one rank, built from a recipe."""

import fcntl
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TypeVar

import nxd_ckpt
from nxd_optim import NeuronZero1Optimizer
from nxd_state import all_gather_object, get_group, get_mesh, get_world_group

from nxd_trainer.api import NxDModel, NxDOptimizer
from nxd_trainer.api.checkpoint_loading import load_checkpoint
from nxd_trainer.api.checkpoint_tags import find_checkpoint
from nxd_trainer.data import (
    CorpusIndex,
    HeldOutLoader,
    Tokenizer,
    TrainLoader,
    build_corpus,
    load_tokenizer,
    open_corpus,
    pack_corpus,
)
from nxd_trainer.from_recipe import build_model, build_optimizer, model_config
from nxd_trainer.hugging_face import load_pretrained
from nxd_trainer.hugging_face.folder import CONFIG_FILE, read_config
from nxd_trainer.model_description import BYTES, ModelDescription, describe_llama, find_description
from nxd_trainer.models import LlamaConfig
from nxd_trainer.recipe import Recipe, check_layout, padded_vocab_size
from nxd_trainer.training.batches import TrainBatches

# What says how a model's weights were drawn, and not what it computes.
_OF_NO_EFFECT = ("initializer_range",)

T = TypeVar("T")


@dataclass
class RunState:
    """What a training run holds on one rank.

    Attributes:
        train_loader: knows the position in the data.
        train_batches: what steps take from it, on the device.
        output_lock: keeps other runs out of the output folder while this object lives.
        step: optimizer steps taken since the run began, over all invocations.
    """

    recipe: Recipe
    config: LlamaConfig
    model: NxDModel
    optimizer: NxDOptimizer
    train_loader: TrainLoader
    train_batches: TrainBatches
    held_out_loader: HeldOutLoader
    tokenizer: Tokenizer
    corpus: CorpusIndex
    output_lock: IO[str] | None
    step: int = 0

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes metrics and shows progress."""
        return get_world_group().rank == 0

    @property
    def layout(self) -> str:
        """Such as "TP 2 x DP 2", or "TP 2 + SP x PP 2 x DP 2, ZeRO-1" with all there is."""
        mesh = get_mesh()
        sequence_parallel = " + SP" if self.recipe.parallel.sequence_parallel else ""
        pipeline = f" x PP {mesh.pp}" if mesh.pp > 1 else ""
        zero1 = ", ZeRO-1" if self.recipe.parallel.zero1 else ""
        return f"TP {mesh.tp}{sequence_parallel}{pipeline} x DP {mesh.dp}{zero1}"


def build_run_state(recipe: Recipe) -> RunState:
    """Data, model and optimizer of a run that begins at step 0. The mesh must be initialised.

    Raises:
        ValueError: the recipe does not fit the layout, or the data cannot be used; the same error on every rank.
    """
    lock = lock_output(recipe.output)
    data_parallel = get_group("dp")
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    vocab_size = padded_vocab_size(recipe, tokenizer.vocab_size)
    check_layout(recipe, data_parallel.size, vocab_size=vocab_size)
    entry = on_first_rank_of_each_host(
        lambda: build_corpus(
            recipe.data.path,
            tokenizer,
            cache_folder=recipe.token_cache_folder,
            suffixes=recipe.data.suffixes,
            include_tests=recipe.data.include_tests,
        )
    )
    corpus = open_corpus(entry)
    train_sequences, held_out_sequences = pack_corpus(
        corpus,
        sequence_length=recipe.data.sequence_length,
        held_out_fraction=recipe.data.held_out_fraction,
    )
    train_loader = TrainLoader(
        train_sequences,
        global_batch_size=recipe.train.global_batch_size,
        gradient_accumulation_steps=recipe.train.gradient_accumulation_steps,
        dp_rank=data_parallel.rank,
        dp_size=data_parallel.size,
        seed=recipe.train.seed,
    )
    held_out_loader = HeldOutLoader(
        held_out_sequences,
        num_batches=recipe.train.eval_batches,
        global_batch_size=recipe.train.global_batch_size,
        gradient_accumulation_steps=recipe.train.gradient_accumulation_steps,
        dp_rank=data_parallel.rank,
        dp_size=data_parallel.size,
    )
    config = model_config(recipe, vocab_size)
    model = build_model(recipe, config)
    return RunState(
        recipe=recipe,
        config=config,
        model=model,
        optimizer=build_optimizer(recipe, model),
        train_loader=train_loader,
        train_batches=TrainBatches(train_loader),
        held_out_loader=held_out_loader,
        tokenizer=tokenizer,
        corpus=corpus.index,
        output_lock=lock,
    )


def on_first_rank_of_each_host(make: Callable[[], T]) -> T:
    """Call `make` on one rank of each host while the others wait; all get its value.

    Raises:
        Exception: what `make` raised on any host, on every rank.
    """
    outcome: tuple[T | None, Exception | None] = (None, None)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            outcome = (make(), None)
        except Exception as error:  # handed to every rank, where it is raised again
            outcome = (None, error)
    outcomes = all_gather_object(outcome, get_world_group())
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return next(value for value, _ in outcomes if value is not None)


def describe_run_model(state: RunState) -> ModelDescription:
    """What checkpoints of the run say of its model."""
    tokenizer = state.recipe.data.tokenizer
    return describe_llama(
        state.config,
        tokenizer=BYTES if tokenizer is None else str(tokenizer),
        end_token=state.tokenizer.end_of_document,
    )


def lock_output(folder: Path) -> IO[str] | None:
    """Lock an output folder for as long as the returned file is open; only the first rank holds one.

    The system lets go of the lock when the process ends, however it ends.

    Raises:
        ValueError: another run holds it; on every rank.
    """
    lock: IO[str] | None = None
    problem = None
    if get_world_group().rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / ".lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"another run is at work in {folder}; wait for it, or choose another output folder"
        except OSError as error:
            problem = f"output={folder} cannot be written: {error}"
    problem = all_gather_object(problem, get_world_group())[0]
    if problem is not None:
        raise ValueError(problem)
    return lock


def load_initial_weights(state: RunState, folder: Path) -> None:
    """Fill the model of a run, whatever its layout, each rank reading its part; types are converted.

    Args:
        state: of a run that begins.
        folder: of checkpoints, whoever wrote them, of which the newest complete one is taken; or of a Hugging Face
            model.

    Raises:
        ValueError: they are weights of another model; it says which sizes differ.
        CheckpointError: there is no such checkpoint, files are damaged, or its tensors are not the model's.
    """
    if (folder / CONFIG_FILE).is_file():
        _check_same_model(state, ModelDescription(read_config(folder)), folder)
        load_pretrained(state.model.pipeline, folder)
    else:
        found = find_checkpoint(folder, None)
        if found.layout == "nxd":
            checkpoint = nxd_ckpt.open_checkpoint(found.root, found.tag)
            _check_same_model(state, find_description(checkpoint), folder)
        load_checkpoint(folder, model=state.model)
    if isinstance(state.optimizer.optimizer, NeuronZero1Optimizer):
        state.optimizer.optimizer.refresh_master_weights()


def _check_same_model(state: RunState, description: ModelDescription | None, folder: Path) -> None:
    """Raise ValueError for another model; of one that is not described, names and shapes must do."""
    if description is None:
        return
    theirs = asdict(description.own_llama())
    differences = [
        f"model.{name} is {value}, there {theirs[name]}"
        for name, value in asdict(state.config).items()
        if name not in _OF_NO_EFFECT and theirs[name] != value
    ]
    if differences:
        raise ValueError(
            f"checkpoint.initial_weights={folder} are of another model: {'; '.join(differences)}. Give the recipe "
            "those sizes"
        )
