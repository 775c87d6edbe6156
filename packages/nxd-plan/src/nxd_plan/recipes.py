"""Recipes of `nxd train`: a planned layout is written as one, and a job is read from one.

nxd-trainer knows the keys and their defaults. It registers the function that reads a recipe as the entry point `recipe`
of the group "nxd.planned_recipes"; the function takes the file and returns a `PlannedRecipe`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import tomli_w
import torch

from nxd_plan.layout import FixedDegrees, Layout, TrainingJob
from nxd_plan.model import PlannedModel

GROUP = "nxd.planned_recipes"
SUFFIXES = (".toml", ".yaml", ".yml")  # a .json file is a config.json of Hugging Face

Recipe = dict[str, dict[str, Any]]  # by section and key
# Keys that a plan knows nothing about, as comments of its .toml, by section; "" is the top level.
NOT_PLANNED = {
    "": ('output = "/shared/runs/first"  # a folder that all hosts see; unset: runs/nxd',),
    "data": (
        'path = "/shared/texts"  # unset: the sources of Python\'s standard library',
        'tokenizer = "/shared/tokenizer.json"  # unset: that of model.path, else a token per byte',
    ),
    "train": ("steps = 300",),
    "optimizer": ("lr = 1e-3", "warmup_steps = 20"),
    "checkpoint": ("save_every = 100", "keep = 3"),
}


@dataclass(frozen=True)
class PlannedRecipe:
    """What a recipe says of a job.

    Attributes:
        model: the model that it trains.
        sequence_length: tokens per sequence.
        global_batch_size: sequences per step, over all ranks.
        dtype: dtype of the weights.
        schedule: the pipeline schedule, by its name in nxd-pipeline.
        fixed: the degrees that its keys set.
        content: its values by section and key, with those of the defaults.
        not_counted: its keys with an effect on memory or time that planning does not know, such as "lora.rank=8".
    """

    model: PlannedModel
    sequence_length: int
    global_batch_size: int
    dtype: torch.dtype
    schedule: str
    fixed: FixedDegrees
    content: Mapping[str, Any]
    not_counted: tuple[str, ...] = ()


def read_recipe(file: Path) -> PlannedRecipe:
    """Read the job of a recipe.

    Raises:
        ValueError: nxd-trainer is not installed, or the recipe has mistakes.
    """
    [*readers] = entry_points(group=GROUP)
    if not readers:
        raise ValueError(f"{file} is a recipe, and planning one needs nxd-trainer: pip install nxd-trainer")
    read: PlannedRecipe = readers[0].load()(file)
    return read


def train_command(file: Path, planned: PlannedRecipe, job: TrainingJob, layout: Layout) -> str:
    """Return the command that trains a recipe in a layout, with the keys that differ from the recipe's."""
    changes = [
        f"{section}.{key}={_on_command_line(value)}"
        for section, keys in recipe(job, layout).items()
        if section != "model"
        for key, value in keys.items()
        if value is not None and value != planned.content.get(section, {}).get(key)
    ]
    return " ".join(["nxd train", str(file), *changes])


def _on_command_line(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def recipe(job: TrainingJob, layout: Layout) -> Recipe:
    """Return the recipe of a run in this layout; the number of ranks is given when it starts.

    Raises:
        ValueError: a recipe cannot name the model.
    """
    return {
        "model": job.model.recipe_section(),
        "parallel": {
            **layout.degrees.as_config(),
            "zero1": layout.degrees.zero1,
            "activation_checkpointing": layout.checkpointing,
        },
        "pipeline": {"schedule": job.schedule},
        "data": {"sequence_length": job.sequence_length},
        "train": {
            "global_batch_size": job.global_batch_size,
            "gradient_accumulation_steps": layout.num_microbatches,
            "dtype": job.dtype_name,
        },
    }


def save_recipe(content: Recipe, file: str | Path) -> Path:
    """Write a recipe without the keys left to their defaults, and return its file.

    A .toml file also lists, as comments, the keys to set before the run.

    Raises:
        ValueError: the file's name ends in neither .toml nor .json.
        OSError: the file cannot be written.
    """
    file = Path(file)
    said = {name: {key: it for key, it in keys.items() if it is not None} for name, keys in content.items()}
    if file.suffix not in (".toml", ".json"):
        raise ValueError(f"{file} must end in .toml or .json")
    file.write_text(_as_toml(said) if file.suffix == ".toml" else json.dumps(said, indent=2), encoding="utf-8")
    return file


def _as_toml(content: Recipe) -> str:
    """Return a recipe, with the keys that are not planned as comments."""
    parts = ["# Before the run, set the keys in comments; the values shown are examples or defaults."]
    parts += [f"# {line}" for line in NOT_PLANNED[""]]
    for name in dict.fromkeys((*content, *(section for section in NOT_PLANNED if section))):
        header, _, keys = tomli_w.dumps({name: content.get(name, {})}).partition("\n")
        if name == "model" and not content[name].keys() & {"path", "type"}:
            header += "  # our own Llama with these sizes, because neither path nor type is set"
        parts += ["", header, *(f"# {line}" for line in NOT_PLANNED.get(name, ())), *keys.splitlines()]
    return "\n".join(parts) + "\n"
