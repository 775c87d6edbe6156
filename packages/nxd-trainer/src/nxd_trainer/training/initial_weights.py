"""The weights that a new run begins with where they are not random: of a checkpoint or of a Hugging Face folder."""

from dataclasses import asdict
from pathlib import Path

import nxd_ckpt
from nxd_optim import NeuronZero1Optimizer

from nxd_trainer.api.checkpoint_loading import load_checkpoint
from nxd_trainer.api.checkpoint_tags import find_checkpoint
from nxd_trainer.hugging_face import load_pretrained
from nxd_trainer.hugging_face.folder import CONFIG_FILE, read_config
from nxd_trainer.model_description import ModelDescription, find_description
from nxd_trainer.training.run_state import RunState

# What says how a model's weights were drawn, and not what it computes.
_OF_NO_EFFECT = ("initializer_range",)


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
        load_pretrained(state.model, folder)
    else:
        found = find_checkpoint(folder, None)
        if found.layout == "nxd":
            checkpoint = nxd_ckpt.open_checkpoint(found.root, found.tag)
            _check_same_model(state, find_description(checkpoint), folder)
        load_checkpoint(folder, model=state.model)
    if isinstance(state.optimizer, NeuronZero1Optimizer):
        state.optimizer.refresh_master_weights()


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
