"""Loads the initial weights that a recipe names, and compares two models."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nxd_ckpt
from nxd_engine import NxDModel, NxDOptimizer, load_checkpoint
from nxd_engine.checkpoints.find import Found, find_checkpoint
from nxd_engine.checkpoints.model_description import (
    InitialWeights,
    ModelDescription,
    adapter_in,
    find_description,
    holds_adapter_alone,
)
from nxd_engine.hugging_face import CONFIG_FILE, full_config, load_pretrained, read_model_config
from nxd_engine.hugging_face.loading import weights_fingerprint
from nxd_lora import adapter_names

from nxd_trainer.training.run_state import RunState, on_first_rank_of_each_host

# Keys that describe how a config was written or how a model is run.
_NOT_COMPARED = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path")


def load_first_weights(state: RunState) -> None:
    """Fill the model of a run with the initial weights that the recipe names, if any. Call it on all ranks.

    Raises:
        ValueError, CheckpointError: as for `load_initial_weights`.
    """
    adapter = load_base(state)
    initial = state.recipe.checkpoint.initial_weights
    if initial is not None and state.description.initial is not None:  # its base model has been loaded
        adapter = _choose(initial).adapter_alone
    if adapter is not None:
        if state.description.initial is None or not state.recipe.lora.rank:
            raise ValueError(
                f"checkpoint.initial_weights={initial} holds a LoRA adapter without its base model; set model.path to "
                "the base model and lora.rank to the adapter's, or use the merged model that nxd export writes"
            )
        load_checkpoint(adapter.root, adapter.tag or None, model=state.model)
        _tell_weights(state.model, state.optimizer, has_adapter=True)


def load_base(state: RunState) -> Found | None:
    """Like `load_first_weights`, but return an adapter without base model instead of loading it. Call on all ranks."""
    return _fill(state, state.model, state.optimizer)


def load_reference(state: RunState) -> None:
    """Fill the reference model of a run, if it has one, with the run's initial weights. Call it on all ranks.

    Raises:
        ValueError, CheckpointError: as for `load_initial_weights`.
    """
    if state.reference is not None:
        _fill(state, state.reference, None)


def _fill(state: RunState, model: NxDModel, optimizer: NxDOptimizer | None) -> Found | None:
    initial, origin = state.recipe.checkpoint.initial_weights, state.recipe.model.path
    known = state.description.initial
    if known is not None and known.tag is None and initial is None:
        on_first_rank_of_each_host(lambda: _check_known(known, weights_fingerprint(known.folder)))
        _load_folder(model, optimizer, state.description, Path(known.folder))
    elif known is not None:  # by its tag: newer checkpoints may have been added to its folder
        load_initial_weights(model, optimizer, state.description, Path(known.folder), known)
    else:
        chosen = None if initial is None else _choose(initial)
        adapter = None if chosen is None else chosen.adapter_alone
        if initial is not None and chosen is not None and adapter is None:
            _load_chosen(model, optimizer, state.description, initial, chosen)
        elif origin is not None:
            _load_folder(model, optimizer, state.description, origin)
        return adapter
    return None


@dataclass(frozen=True)
class _Chosen:
    """The contents of a folder of initial weights."""

    found: Found | None  # the checkpoint; None for a Hugging Face folder
    description: ModelDescription | None = None  # the model's description, if it has one
    has_adapter: bool = False  # whether it holds an adapter
    is_alone: bool = False  # whether it holds an adapter only

    @property
    def adapter_alone(self) -> Found | None:
        """The checkpoint, if it holds an adapter without its base model."""
        return self.found if self.is_alone else None


def _choose(folder: Path, known: InitialWeights | None = None) -> _Chosen:
    """Choose a checkpoint once for all ranks, as new ones may be saved meanwhile. Call it on all ranks."""

    def look() -> _Chosen:
        if (folder / CONFIG_FILE).is_file():
            _check_known(known, weights_fingerprint(folder) if known is not None else "")
            return _Chosen(None, ModelDescription(read_model_config(folder)))
        found = find_checkpoint(folder, None if known is None else known.tag)
        if found.layout != "nxd":
            return _Chosen(found)
        checkpoint = nxd_ckpt.open_checkpoint(found.root, found.tag)
        _check_known(known, checkpoint.save_id)
        adapter = adapter_in(checkpoint)
        return _Chosen(found, find_description(checkpoint), adapter is not None, holds_adapter_alone(checkpoint))

    return on_first_rank_of_each_host(look)


def load_initial_weights(
    model: NxDModel,
    optimizer: NxDOptimizer | None,
    description: ModelDescription,
    folder: Path,
    known: InitialWeights | None = None,
) -> None:
    """Fill a model of any layout, each rank reading its part; dtypes are converted. Call it on all ranks.

    Args:
        model: the model to train; adapters keep their own initial weights, unless the folder has some.
        optimizer: an optimizer that has not taken a step; None for a model that is not trained.
        description: the model's description.
        folder: a folder of checkpoints of any kind, whose newest complete one is used; or a Hugging Face folder.
        known: the expected weights; any if None.

    Raises:
        ValueError: the weights belong to another model (the message says which sizes differ), or are not `known`.
        CheckpointError: there is no such checkpoint, files are damaged, or its tensors are not the model's.
    """
    _load_chosen(model, optimizer, description, folder, _choose(folder, known))


def _load_chosen(
    model: NxDModel, optimizer: NxDOptimizer | None, description: ModelDescription, folder: Path, chosen: _Chosen
) -> None:
    found, theirs = chosen.found, chosen.description
    differences = [] if theirs is None else model_differences(description, theirs, "there", among=_matters_to_weights)
    if differences:  # without a description, only names and shapes are compared
        raise ValueError(
            f"checkpoint.initial_weights={folder} belong to another model: {'; '.join(differences)}. Set the recipe "
            "to those sizes"
        )
    if found is None:
        _load_folder(model, optimizer, description, folder)
    else:
        load_checkpoint(found.root, found.tag or None, model=model)
        _tell_weights(model, optimizer, has_adapter=chosen.has_adapter)


def _check_known(known: InitialWeights | None, fingerprint: str) -> None:
    if known is not None and known.fingerprint != fingerprint:
        raise ValueError(
            f"the weights in {known} have changed since the run started; restore them, or start another run"
        )


def _load_folder(model: NxDModel, optimizer: NxDOptimizer | None, description: ModelDescription, folder: Path) -> None:
    """Fill a model, except for adapters, from a Hugging Face folder. Call it on all ranks."""
    adapters = [] if model.lora_model is None else adapter_names(model.lora_model, with_biases=False)
    load_pretrained(model.pipeline, folder, may_lack=adapters, left_out=description.left_out)
    _tell_weights(model, optimizer)


def _tell_weights(model: NxDModel, optimizer: NxDOptimizer | None, *, has_adapter: bool = False) -> None:
    """Notify adapters and optimizer that weights have been loaded without them."""
    if model.lora_model is not None and not has_adapter:
        model.lora_model.reset_magnitudes()
    if optimizer is not None:
        optimizer.refresh_master_weights()


def model_differences(
    own: ModelDescription, other: ModelDescription, told: str, *, among: Callable[[str], bool] = lambda _: True
) -> list[str]:
    """List differences between two models, such as "model.hidden_size is 64, there 128", where `told` is "there".

    Only keys for which `among` is true are compared.
    """
    ours, theirs = _compared(own), _compared(other)
    return [
        f"model.{name} is {ours.get(name)}, {told} {theirs.get(name)}"
        for name in {**ours, **theirs}
        if among(name) and ours.get(name) != theirs.get(name)
    ]


def _compared(description: ModelDescription) -> dict[str, Any]:
    """Return the sizes of a Llama that ours supports, whatever its description; for others, all config keys."""
    if description.factory is not None:
        return {**description.config, "factory": description.factory}
    try:
        return asdict(description.own_llama())
    except ValueError:
        content = full_config(description.config)
        return {name: value for name, value in content.items() if name not in _NOT_COMPARED}


def _matters_to_weights(name: str) -> bool:
    """Whether a config key affects what is computed with weights, not how they are initialized or trained."""
    return name != "initializer_range" and not name.endswith(("dropout", "_pdrop", "_token_id"))
