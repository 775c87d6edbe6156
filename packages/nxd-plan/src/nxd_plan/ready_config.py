"""Turns a layout into runnable config: a `neuronx_distributed_config(...)` call, and a recipe for `nxd train`."""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from nxd_engine.config import complete_config
from nxd_engine.training_config import training_config
from nxd_pipeline import NxDPPModel

from nxd_plan.layout import Job, Layout

Recipe = dict[str, dict[str, Any]]  # by section and key


def config_call(job: Job, layout: Layout) -> str:
    """Python lines that create the model in this layout; they need imports of `nxd`, `torch` and the model's names."""
    parallel = layout.degrees.sequence_parallel
    arguments = training_config(
        job.model.spec(job.dtype, sequence_parallel=parallel),
        layout.degrees,
        num_microbatches=layout.num_microbatches,
        schedule=job.schedule,
        activation_checkpointing=layout.checkpointing,
    )
    lines = [*job.model.config_lines(job.dtype_name), "nxd_config = nxd.neuronx_distributed_config("]
    lines += [f"    {name}={value}," for name, value in _not_by_default(arguments).items()]
    given = ", ".join(["nxd_config", *job.model.model_arguments(job.dtype_name, sequence_parallel=parallel)])
    return "\n".join([*lines, ")", f"model = nxd.initialize_parallel_model({given})"])


def _not_by_default(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that differ from their defaults, as Python source; sections with their changed keys only."""
    default = complete_config({})
    pipeline = {name: it.default for name, it in inspect.signature(NxDPPModel).parameters.items()}
    shown = {}
    for name, value in arguments.items():
        if not isinstance(value, Mapping):
            if value != default[name]:
                shown[name] = _as_python(value)
            continue
        usual = pipeline if name == "pipeline_config" else default[name]
        entries = [f"{_as_python(key)}: {_as_python(it)}" for key, it in value.items() if it != usual[key]]
        if entries:
            shown[name] = "{\n" + "".join(f"        {entry},\n" for entry in entries) + "    }"
    return shown


def _as_python(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if inspect.ismethod(value):  # a method of the model on the meta device
        return f"outline.{value.__name__}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_python, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def recipe(job: Job, layout: Layout) -> Recipe:
    """The recipe of a run in this layout; the number of ranks is given at its start.

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

    Raises:
        ValueError: the file's name ends in neither .toml nor .json.
        OSError: the file cannot be written.
    """
    file = Path(file)
    said = {name: {key: it for key, it in keys.items() if it is not None} for name, keys in content.items()}
    if file.suffix not in (".toml", ".json"):
        raise ValueError(f"{file} must end in .toml or .json")
    file.write_text(tomli_w.dumps(said) if file.suffix == ".toml" else json.dumps(said, indent=2), encoding="utf-8")
    return file
