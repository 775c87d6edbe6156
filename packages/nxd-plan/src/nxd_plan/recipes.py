"""Recipes of `nxd train`: a planned layout is written as one, and a job is read from one.

nxd-trainer knows the keys and their defaults. It registers the function that reads a recipe as the entry point `recipe`
of the group "nxd.planned_recipes". The function takes the file and `key=value` overrides; it returns a `PlannedRecipe`.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
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
        given: the values that it sets, by section and key.
        content: its values by section and key, with those of the defaults.
        not_counted: its keys with an effect on memory or time that planning does not know, such as "lora.rank=8".
        kept: its keys with values that no layout has, such as "parallel.activation_checkpointing", which stay.
    """

    model: PlannedModel
    sequence_length: int
    global_batch_size: int
    dtype: torch.dtype
    schedule: str
    fixed: FixedDegrees
    given: Mapping[str, Any]
    content: Mapping[str, Any]
    not_counted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def read_recipe(file: Path, overrides: Sequence[str] = ()) -> PlannedRecipe:
    """Read the job of a recipe, with `key=value` overrides.

    Raises:
        ValueError: nxd-trainer is not installed, or the recipe has mistakes.
    """
    [*readers] = entry_points(group=GROUP)
    if not readers:
        raise ValueError(f"{file} is a recipe, and planning one needs nxd-trainer: pip install nxd-trainer")
    read: PlannedRecipe = readers[0].load()(file, overrides)
    return read


def changed_keys(planned: PlannedRecipe, job: TrainingJob, layout: Layout) -> Recipe:
    """Return the keys whose values a layout changes, by section and key."""
    sections = _layout_sections(job, layout)
    of_experts = planned.content.get("parallel", {}).get("expert_tensor_parallel_size")
    if of_experts not in (None, layout.degrees.etp):  # a recipe of a layout leaves the default out
        sections["parallel"]["expert_tensor_parallel_size"] = layout.degrees.etp
    changes = {
        section: {
            key: value
            for key, value in keys.items()
            if value is not None
            and value != planned.content.get(section, {}).get(key)
            and f"{section}.{key}" not in planned.kept
        }
        for section, keys in sections.items()
    }
    return {section: keys for section, keys in changes.items() if keys}


def train_command(file: Path, changes: Recipe, overrides: Sequence[str] = ()) -> str:
    """Return the command that trains a recipe with overrides and the changes of a layout."""
    layout = [
        f"{section}.{key}={_on_command_line(value)}" for section, keys in changes.items() for key, value in keys.items()
    ]
    kept = [it for it in overrides if it.partition("=")[0] not in {found.partition("=")[0] for found in layout}]
    return shlex.join(["nxd", "train", str(file), *kept, *layout])


def save_changed(planned: PlannedRecipe, changes: Recipe, file: Path) -> Path:
    """Write a recipe with the keys that it sets and the changes of a layout, and return its file.

    Raises:
        ValueError: the file's name ends in neither .toml nor .json.
        OSError: the file cannot be written.
    """
    content = {name: dict(value) if isinstance(value, Mapping) else value for name, value in planned.given.items()}
    for section, keys in changes.items():
        content[section] = {**content.get(section, {}), **keys}
    return _written(content, file, tomli_w.dumps)


def _on_command_line(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def recipe(job: TrainingJob, layout: Layout) -> Recipe:
    """Return the recipe of a run in this layout; the number of ranks is given when it starts.

    Raises:
        ValueError: a recipe cannot name the model.
    """
    return {"model": job.model.recipe_section(), **_layout_sections(job, layout)}


def _layout_sections(job: TrainingJob, layout: Layout) -> Recipe:
    """Return the keys of a recipe that a layout and its job set, which are not the model's."""
    return {
        "parallel": {
            **layout.degrees.as_config(),
            "zero_stage": layout.degrees.zero_stage,
            "shard_group_size": layout.degrees.shard_group_size or None,
            "reshard_after_forward": None if layout.reshard_after_forward is True else layout.reshard_after_forward,
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
    said = {name: {key: it for key, it in keys.items() if it is not None} for name, keys in content.items()}
    return _written(said, Path(file), _as_toml)


def _written(content: Mapping[str, Any], file: Path, as_toml: Callable[[Any], str]) -> Path:
    if file.suffix not in (".toml", ".json"):
        raise ValueError(f"{file} must end in .toml or .json")
    file.write_text(as_toml(content) if file.suffix == ".toml" else json.dumps(content, indent=2), encoding="utf-8")
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
