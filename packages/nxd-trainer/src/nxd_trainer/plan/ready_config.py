"""A layout as what runs it: the `neuronx_distributed_config(...)` of a script, and a recipe of `nxd train`."""

from dataclasses import asdict, fields

from nxd_trainer.models import LlamaConfig
from nxd_trainer.plan.layout import Job, Layout
from nxd_trainer.plan.step_time import planned_schedule
from nxd_trainer.recipe import ModelSection, Recipe, recipe_from_dict


def config_call(job: Job, layout: Layout) -> str:
    """Lines of Python that lay out the Llama of this package so; `nxd`, `torch` and the Llama's names are imported."""
    lines = ["nxd_config = nxd.neuronx_distributed_config("]
    lines += [f"    {name}={value}," for name, value in _config_arguments(job, layout).items()]
    lines += [")", f"config = LlamaConfig({_sizes(job.config)})"]
    arguments = ["nxd_config", "LlamaForCausalLM", "config"]
    arguments += [f"sequence_parallel={layout.sequence_parallel}", f"dtype={job.dtype}"]
    return "\n".join([*lines, f"model = nxd.initialize_parallel_model({', '.join(arguments)})"])


def _config_arguments(job: Job, layout: Layout) -> dict[str, str]:
    """The arguments that are not as by default, as Python writes them."""
    arguments = {"tensor_parallel_size": str(layout.tensor_parallel_size)}
    pipeline = [f'"num_microbatches": {layout.num_microbatches}', '"input_names": ["input_ids", "labels"]']
    if layout.pipeline_parallel_size > 1:
        arguments["pipeline_parallel_size"] = str(layout.pipeline_parallel_size)
        pipeline += ['"transformer_layer_cls": LlamaDecoderLayer', '"auto_partition": True']
        if job.schedule != "1f1b":
            schedule = planned_schedule(job.schedule, layout.pipeline_parallel_size, layout.num_microbatches)
            pipeline.append(f'"schedule": "{job.schedule}"')
            pipeline.append(f'"virtual_pipeline_size": {schedule.num_stages // schedule.num_ranks}')
    arguments["pipeline_config"] = "{\n" + "".join(f"        {entry},\n" for entry in pipeline) + "    }"
    if layout.zero1:
        arguments["optimizer_config"] = '{"zero_one_enabled": True}'
    if layout.checkpointing != "none":
        arguments["activation_checkpoint_config"] = f'"{layout.checkpointing}"'
    if layout.sequence_parallel:
        arguments["sequence_parallel"] = "True"
    return arguments


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
    sizes = asdict(job.config)
    return recipe_from_dict(
        {
            "model": {field.name: sizes[field.name] for field in fields(ModelSection)},
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
