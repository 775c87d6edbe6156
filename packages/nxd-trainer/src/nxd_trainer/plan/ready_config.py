"""A layout as what runs it: a recipe of `nxd train`, and the `neuronx_distributed_config(...)` that this means."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nxd_pipeline import NxDPPModel

from nxd_trainer.api.config import complete_config
from nxd_trainer.from_recipe import llama_model, nxd_config
from nxd_trainer.models import LlamaConfig
from nxd_trainer.plan.layout import Job, Layout
from nxd_trainer.recipe import Recipe, recipe_from_dict


def config_call(job: Job, layout: Layout) -> str:
    """Lines of Python that lay out the Llama of this package so; `nxd`, `torch` and the Llama's names are imported."""
    planned = recipe(job, layout)
    arguments = nxd_config(planned, llama_model(planned, job.config))
    lines = ["nxd_config = nxd.neuronx_distributed_config("]
    lines += [f"    {name}={value}," for name, value in _not_by_default(arguments).items()]
    lines += [")", f"config = LlamaConfig({_sizes(job.config)})"]
    further = ["nxd_config", "LlamaForCausalLM", "config"]
    further += [f"sequence_parallel={layout.sequence_parallel}", f"dtype={job.dtype}"]
    return "\n".join([*lines, f"model = nxd.initialize_parallel_model({', '.join(further)})"])


def _not_by_default(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that are not as by default, as Python writes them; of sections the keys."""
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
    if isinstance(value, list):
        return f"[{', '.join(map(_as_python, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _sizes(config: LlamaConfig) -> str:
    """Arguments of `LlamaConfig`, one to a line, those that are not as by default."""
    default = asdict(LlamaConfig())
    return (
        "".join(f"\n    {name}={value!r}," for name, value in asdict(config).items() if value != default[name]) + "\n"
    )


def recipe(job: Job, layout: Layout) -> Recipe:
    """The recipe of a run in this layout, on the ranks that it is started with.

    Raises:
        ValueError: `nxd train` cannot train with something of the job.
    """
    return recipe_from_dict(
        {
            "model": asdict(job.config),
            "parallel": {
                "tensor_parallel_size": layout.tensor_parallel_size,
                "sequence_parallel": layout.sequence_parallel,
                "pipeline_parallel_size": layout.pipeline_parallel_size,
                "zero1": layout.zero1,
                "activation_checkpointing": layout.checkpointing,
            },
            "pipeline": {"schedule": job.schedule},
            "data": {"sequence_length": job.sequence_length},
            "train": {
                "global_batch_size": job.global_batch_size,
                "gradient_accumulation_steps": layout.num_microbatches,
                "dtype": job.dtype_name,
            },
        },
        origin="planned recipe",
    )
