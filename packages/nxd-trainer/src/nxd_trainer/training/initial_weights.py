"""The weights that a new run begins with where they are not random: of a checkpoint or of a Hugging Face folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import nxd_ckpt
from nxd_optim import NeuronZero1Optimizer

from nxd_trainer.checkpoint import model_state
from nxd_trainer.hugging_face import load_pretrained
from nxd_trainer.hugging_face.folder import CONFIG_FILE, read_config
from nxd_trainer.hugging_face.our_llama import our_config
from nxd_trainer.training.run_state import RunState

# What says how a model's weights were drawn, and not what it computes.
_OF_NO_EFFECT = ("initializer_range",)


def load_initial_weights(state: RunState, folder: Path) -> None:
    """Fill the model of a run, whatever its layout, each rank reading its part; types are converted.

    Args:
        state: of a run that begins.
        folder: of checkpoints, whose newest complete one is taken, or of a Hugging Face model.

    Raises:
        ValueError: they are weights of another model; it says which sizes differ.
        CheckpointError: there is no such checkpoint, or files are damaged.
    """
    if (folder / CONFIG_FILE).is_file():
        _check_same_model(state, asdict(our_config(read_config(folder))), folder)
        load_pretrained(state.model.pipeline, folder)
    else:
        _load_checkpoint(state, folder)
    if isinstance(state.optimizer.optimizer, NeuronZero1Optimizer):
        state.optimizer.optimizer.refresh_master_weights()


def _load_checkpoint(state: RunState, folder: Path) -> None:
    checkpoint = nxd_ckpt.open_checkpoint(folder)
    objects = checkpoint.objects if isinstance(checkpoint.objects, dict) else {}
    if "model" not in objects:
        raise ValueError(
            f"checkpoint.initial_weights={folder} is not of a Llama that this package runs; give checkpoints of "
            "nxd train, or what nxd import has made of such a Llama"
        )
    _check_same_model(state, objects["model"], folder)
    nxd_ckpt.load(folder, checkpoint.tag, into=model_state(state.model.pipeline), strict=False, convert_dtype=True)


def _check_same_model(state: RunState, theirs: dict[str, Any], folder: Path) -> None:
    differences = [
        f"model.{name} is {value}, there {theirs.get(name)}"
        for name, value in asdict(state.config).items()
        if name not in _OF_NO_EFFECT and theirs.get(name) != value
    ]
    if differences:
        raise ValueError(
            f"checkpoint.initial_weights={folder} are of another model: {'; '.join(differences)}. Give the recipe "
            "those sizes"
        )
