"""Everything a training run holds on one rank, built from a recipe."""

import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import nxd_ckpt
from nxd_layers.lora import adapter_names
from nxd_optim import NeuronZero1Optimizer
from nxd_state import all_gather_object, get_group, get_mesh, get_world_group

from nxd_trainer.api import NxDModel, NxDOptimizer
from nxd_trainer.api.checkpoint_loading import load_checkpoint
from nxd_trainer.api.checkpoint_tags import Found, find_checkpoint
from nxd_trainer.api.rank_sync import together
from nxd_trainer.data import CorpusIndex, HeldOutLoader, TrainLoader, build_corpus, open_corpus, pack_corpus
from nxd_trainer.from_recipe import build_model, build_optimizer, recipe_model, tokenizer_of
from nxd_trainer.hugging_face import load_pretrained
from nxd_trainer.hugging_face.conversion import complete_config
from nxd_trainer.hugging_face.folder import CONFIG_FILE, read_config
from nxd_trainer.model_description import ModelDescription, find_description
from nxd_trainer.recipe import Recipe, check_layout
from nxd_trainer.training.batches import TrainBatches

# What says how a config was written, or how a model is run.
_NOT_COMPARED = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path")

T = TypeVar("T")


@dataclass
class RunState:
    """What a training run holds on one rank.

    Attributes:
        description: of the model, for checkpoints.
        input_names: what the model takes of a batch.
        train_loader: knows the position in the data.
        train_batches: what steps take from it, on the device.
        output_lock: keeps other runs out of the output folder while this object lives.
        step: optimizer steps taken since the run began, over all invocations.
    """

    recipe: Recipe
    description: ModelDescription
    input_names: Sequence[str]
    model: NxDModel
    optimizer: NxDOptimizer
    train_loader: TrainLoader
    train_batches: TrainBatches
    held_out_loader: HeldOutLoader
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
    source = together("make out its model", lambda: recipe_model(recipe), error_type=ValueError)
    check_layout(recipe, data_parallel.size, vocab_size=source.description.config.get("vocab_size"))
    tokenizer, _ = tokenizer_of(recipe)
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
    model = build_model(recipe, source)
    return RunState(
        recipe=recipe,
        description=source.description,
        input_names=source.input_names,
        model=model,
        optimizer=build_optimizer(recipe, model),
        train_loader=train_loader,
        train_batches=TrainBatches(train_loader),
        held_out_loader=held_out_loader,
        corpus=corpus.index,
        output_lock=lock,
    )


def on_first_rank_of_each_host(make: Callable[[], T]) -> T:
    """Call `make` on one rank of each host while the others wait; all get its value.

    Raises:
        Exception: what `make` raised on any host, on every rank.
    """
    outcome: tuple[list[T], Exception | None] = ([], None)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            outcome = ([make()], None)
        except Exception as error:  # handed to every rank, where it is raised again
            outcome = ([], error)
    outcomes = all_gather_object(outcome, get_world_group())
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return next(value for values, _ in outcomes for value in values)


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


def load_first_weights(state: RunState) -> None:
    """Fill the model of a run with what it is to begin with, if the recipe names weights. By all ranks.

    Raises:
        ValueError: as for `load_initial_weights`.
        CheckpointError: as for `load_initial_weights`.
    """
    initial, origin = state.recipe.checkpoint.initial_weights, state.recipe.model.path
    if initial is not None:
        load_initial_weights(state.model, state.optimizer, state.description, initial)
    elif origin is not None:
        _load_folder(state.model, state.optimizer, origin)


def load_initial_weights(model: NxDModel, optimizer: NxDOptimizer, description: ModelDescription, folder: Path) -> None:
    """Fill a model, whatever its layout, each rank reading its part; types are converted. By all ranks.

    Args:
        model: to be trained; adapters keep their own first weights, unless the folder has some.
        optimizer: that has not taken a step.
        description: of the model.
        folder: of checkpoints, whoever wrote them, of which the newest complete one is taken; or of a Hugging Face
            model.

    Raises:
        ValueError: they are weights of another model; it says which sizes differ.
        CheckpointError: there is no such checkpoint, files are damaged, or its tensors are not the model's.
    """

    def look() -> tuple[Found | None, ModelDescription | None]:
        if (folder / CONFIG_FILE).is_file():
            return None, ModelDescription(read_config(folder))
        found = find_checkpoint(folder, None)
        is_described = found.layout == "nxd"
        return found, find_description(nxd_ckpt.open_checkpoint(found.root, found.tag)) if is_described else None

    found, theirs = on_first_rank_of_each_host(look)  # once for all ranks
    differences = [] if theirs is None else model_differences(description, theirs, "there", among=_matters_to_weights)
    if differences:  # of a model that is not described, names and shapes must do
        raise ValueError(
            f"checkpoint.initial_weights={folder} are of another model: {'; '.join(differences)}. Give the recipe "
            "those sizes"
        )
    if found is None:
        _load_folder(model, optimizer, folder)
    else:
        load_checkpoint(found.root, found.tag or None, model=model)
        _tell_weights(optimizer)


def _load_folder(model: NxDModel, optimizer: NxDOptimizer, folder: Path) -> None:
    """Fill a model from a Hugging Face folder, but for adapters. By all ranks."""
    adapters = set() if model.lora_model is None else set(adapter_names(model.lora_model, with_biases=False))
    missing = load_pretrained(model.pipeline, folder, strict=not adapters)
    of_ranks = all_gather_object([name for name in missing if name not in adapters], get_world_group())
    lacking = sorted({name for names in of_ranks for name in names})
    if lacking:
        raise ValueError(f"{folder} does not fit the model: it lacks {', '.join(lacking[:5])}")
    _tell_weights(optimizer)


def _tell_weights(optimizer: NxDOptimizer) -> None:
    """After weights have been loaded without their optimizer."""
    if isinstance(optimizer.optimizer, NeuronZero1Optimizer):
        optimizer.optimizer.refresh_master_weights()


def model_differences(
    own: ModelDescription, other: ModelDescription, told: str, *, among: Callable[[str], bool] = lambda _: True
) -> list[str]:
    """What another model has otherwise, such as "model.hidden_size is 64, there 128".

    Args:
        own: one model.
        other: the other one.
        told: goes before the other's values, such as "there".
        among: whether a key counts.
    """
    ours, theirs = _compared(own), _compared(other)
    return [
        f"model.{name} is {ours.get(name)}, {told} {theirs.get(name)}"
        for name in {**ours, **theirs}
        if among(name) and ours.get(name) != theirs.get(name)
    ]


def _compared(description: ModelDescription) -> dict[str, Any]:
    """The sizes of a Llama that ours can be, whoever describes it; of others all keys of their config."""
    if description.factory is not None:
        return {**description.config, "factory": description.factory}
    try:
        return asdict(description.own_llama())
    except ValueError:
        content = complete_config(description.config)
        return {name: value for name, value in content.items() if name not in _NOT_COMPARED}


def _matters_to_weights(name: str) -> bool:
    """Whether a key of a config says what is computed with weights, not how they began or how they are trained."""
    return name != "initializer_range" and not name.endswith(("dropout", "_pdrop", "_token_id"))
