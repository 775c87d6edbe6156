"""A layout as runnable config: a recipe of `nxd train`, and the equivalent `neuronx_distributed_config(...)` call."""

import inspect
from collections.abc import Mapping
from typing import Any

from nxd_engine.config import complete_config
from nxd_pipeline import NxDPPModel

from nxd_trainer.from_recipe import nxd_config
from nxd_trainer.plan.layout import Job, Layout
from nxd_trainer.recipe import Recipe, recipe_from_dict


def config_call(job: Job, layout: Layout) -> str:
    """Lines of Python that make the model in this layout; names of `nxd`, `torch` and of the model are imported."""
    planned = _recipe(job, layout, {"path": "."})  # the lines do not depend on what a recipe says of the model
    arguments = nxd_config(planned, job.model.recipe_model(planned))
    lines = [*job.model.config_lines(planned), "nxd_config = nxd.neuronx_distributed_config("]
    lines += [f"    {name}={value}," for name, value in _not_by_default(arguments).items()]
    given = ", ".join(["nxd_config", *job.model.model_arguments(planned)])
    return "\n".join([*lines, ")", f"model = nxd.initialize_parallel_model({given})"])


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
    if inspect.ismethod(value):  # of the model without memory
        return f"outline.{value.__name__}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_python, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def recipe(job: Job, layout: Layout) -> Recipe:
    """The recipe of a run in this layout, on the ranks that it is started with.

    Raises:
        ValueError: `nxd train` cannot train with something of the job, or a recipe cannot name the model.
    """
    return _recipe(job, layout, job.model.recipe_section())


def _recipe(job: Job, layout: Layout, model: Mapping[str, Any]) -> Recipe:
    has_whole_experts = layout.ranks_of_an_expert < layout.tensor_parallel_size
    whole_experts = {"expert_tensor_parallel_size": 1} if has_whole_experts else {}
    return recipe_from_dict(
        {
            "model": model,
            "parallel": {
                "tensor_parallel_size": layout.tensor_parallel_size,
                "sequence_parallel": layout.sequence_parallel,
                "pipeline_parallel_size": layout.pipeline_parallel_size,
                "context_parallel_size": layout.context_parallel_size,
                "expert_parallel_size": layout.expert_parallel_size,
                **whole_experts,
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
