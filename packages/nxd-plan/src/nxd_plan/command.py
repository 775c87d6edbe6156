"""`nxd plan`: finds the layouts of a training job that fit a cluster, and the fastest of them."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_cli.command import UserError, make_parser, parse, reports_user_errors, take_settings

if TYPE_CHECKING:
    from nxd_plan import FixedDegrees, Layout, PlannedRecipe, TrainingJob

JOB_FLAGS = ("sequence_length", "global_batch_size", "dtype", "schedule")
MODEL_FLAGS = {
    "vocab_size": "rows of the embedding",
    "hidden_size": "width of the residual stream",
    "intermediate_size": "width inside the MLP",
    "num_hidden_layers": "decoder layers",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key/value heads; if unset, same as query heads",
    "max_position_embeddings": "longest sequence that the model supports",
}
DEVICE_FLAGS: dict[str, tuple[str, float, str]] = {  # field of a device, flag's unit, help
    "memory_gib": ("memory_bytes", 2**30, "memory per device, GiB"),
    "tflops": ("flops", 1e12, "peak per device, TFLOP/s"),
    "memory_bandwidth_gb": ("memory_bandwidth", 1e9, "memory bandwidth per device, GB/s"),
    "intra_host_gb": ("intra_host_bandwidth", 1e9, "send bandwidth from a device to others on its host, GB/s"),
    "inter_host_gb": ("inter_host_bandwidth", 1e9, "send bandwidth from a device to other hosts, GB/s"),
}
DEGREE_FLAGS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size"),
    *("expert_tensor_parallel_size", "sequence_parallel", "zero_stage", "microbatch_size", "num_microbatches"),
    *("checkpointing", "shard_group_size", "reshard_after_forward"),
)
OTHER_FLAGS = ("device", "devices", "devices_per_host", "top", "rejected", "json", "recipe", "help")
FLAGS = [it.replace("_", "-") for it in (*JOB_FLAGS, *MODEL_FLAGS, *DEVICE_FLAGS, *DEGREE_FLAGS, *OTHER_FLAGS)]
YES_NO = {"yes": True, "no": False}
DTYPES = ("bfloat16", "float32")  # the recipe dtypes that devices list a speed for


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "plan",
        "Try every layout of a model over a number of devices, without needing the devices. The model is a "
        "Llama, or any causal language model of transformers that `nxd train` can train. Sizes, memory and messages "
        "come from the real layers; times are estimates for comparing layouts.",
        examples=[
            "nxd plan Qwen3-8B --device h100 --devices 16",
            "nxd plan Qwen3-8B --device trn2 --devices 64 --sequence-length 8192 --recipe recipe.toml",
            "nxd plan recipe.toml --device h100 --devices 32",
            "nxd plan --device h100 --devices 8 --hidden-size 4096 --num-hidden-layers 32 --vocab-size 32000 --json",
        ],
    )
    parser.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="a Hugging Face config.json, its folder, a checkpoint folder, or a recipe of nxd train (.toml, .yaml), "
        "whose keys, also those after it as KEY=VALUE, count as if given as flags",
    )
    job = parser.add_argument_group("the job")
    job.add_argument(
        "--device", required=True, help="trn1, trn2, inf2, h100 or cpu (numbers cited from memory, not measured)"
    )
    job.add_argument("--devices", required=True, type=int, metavar="N", help="number of devices, one rank on each")
    job.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="tokens per sequence (default: the recipe's, or 4096, or the model's limit)",
    )
    job.add_argument(
        "--global-batch-size", type=int, metavar="N", help="sequences per step (default: the recipe's, or 1024)"
    )
    job.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: the recipe's, or bfloat16)")
    job.add_argument("--schedule", help="pipeline schedule, as named in nxd-pipeline (default: the recipe's, or 1f1b)")
    _add_degrees(parser)
    model = parser.add_argument_group("the model, instead of a config.json or overriding its values")
    for name, text in MODEL_FLAGS.items():
        model.add_argument(_flag(name), type=int, metavar="N", help=text)
    device = parser.add_argument_group("overrides of the device's numbers")
    for name, (_, _, text) in DEVICE_FLAGS.items():
        device.add_argument(_flag(name), type=float, metavar="X", help=text)
    device.add_argument("--devices-per-host", type=int, metavar="N", help="devices that share a host")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top", type=int, default=10, metavar="N", help="number of fastest layouts to show (default: 10)"
    )
    output.add_argument("--rejected", action="store_true", help="also show the layouts that do not fit, and why")
    output.add_argument(
        "--json", action="store_true", help="print the whole plan as JSON (bytes, seconds) instead of the table"
    )
    output.add_argument(
        "--recipe", type=Path, metavar="FILE", help="write the fastest layout as a recipe (.toml or .json)"
    )
    return parser


def _add_degrees(parser: argparse.ArgumentParser) -> None:
    degrees = parser.add_argument_group("fixed degrees, instead of trying all")
    degrees.add_argument("--tensor-parallel-size", type=int, metavar="N", help="ranks that split each layer")
    degrees.add_argument(
        "--pipeline-parallel-size", type=int, metavar="N", help="ranks that the layers are split into stages over"
    )
    degrees.add_argument(
        "--context-parallel-size", type=int, metavar="N", help="ranks that each sequence is split over"
    )
    degrees.add_argument(
        "--expert-parallel-size", type=int, metavar="N", help="ranks that the experts of a layer are distributed over"
    )
    degrees.add_argument(
        "--expert-tensor-parallel-size",
        type=int,
        metavar="N",
        help="ranks that split each expert: 1, or the tensor-parallel size",
    )
    degrees.add_argument(
        "--sequence-parallel", choices=YES_NO, help="split activations along the sequence; needs TP > 1"
    )
    degrees.add_argument(
        "--zero-stage",
        type=int,
        choices=range(4),
        help="shard over the replicas: 1 optimizer states, 2 also gradients, 3 also parameters (default: the least "
        "that fits)",
    )
    degrees.add_argument(
        "--shard-group-size",
        type=int,
        metavar="N",
        help="neighboring replicas that share what is sharded, mirrored by others (default: all, or those of a host)",
    )
    degrees.add_argument(
        "--reshard-after-forward",
        type=_reshard,
        metavar="yes|no|N",
        help="with --zero-stage 3: give parameters up after forward (default), keep them, or share them among N ranks",
    )
    degrees.add_argument(
        "--microbatch-size", type=int, metavar="N", help="sequences per microbatch (default: try 1, 2, 4 and 8)"
    )
    degrees.add_argument("--num-microbatches", type=int, metavar="N", help="microbatches per replica and step")
    degrees.add_argument("--checkpointing", choices=("none", "full"), help="recompute layers in backward")


def _reshard(text: str) -> bool | int:
    return YES_NO[text] if text in YES_NO else int(text)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def main(arguments: Sequence[str]) -> int:
    """Plan, and show the fastest layouts, and how to run the first."""
    remaining, settings = take_settings(arguments, FLAGS, without_value=("rejected", "json", "help"))
    options = parse(_parser(), remaining)
    from nxd_plan import make_plan  # noqa: PLC0415
    from nxd_plan.planner import activation_modes  # noqa: PLC0415
    from nxd_plan.render import (  # noqa: PLC0415
        explain_no_fit,
        plan_as_json,
        render_detail,
        render_rejected,
        render_table,
    )

    planned = reports_user_errors(lambda: _recipe(options, settings))
    job = reports_user_errors(lambda: _job(options, planned))
    fixed = reports_user_errors(lambda: _degrees(options, planned))
    plan = reports_user_errors(lambda: make_plan(job, fixed, top=options.top))
    if options.json:
        print(plan_as_json(plan))
    elif options.rejected:
        print(render_rejected(plan))
    if not plan.best:
        raise UserError(explain_no_fit(plan, fixed))
    layout = plan.best[0].layout
    if not options.json:
        print(render_table(plan))
        print(f"\nthe fastest: {render_detail(plan.best[0], activation_modes(job, layout))}")
    told = _run_model(options, job, layout) if planned is None else _run_recipe(options, settings, planned, job, layout)
    print(told, end="", file=sys.stderr if options.json else sys.stdout)
    return 0


def _run_model(options: argparse.Namespace, job: "TrainingJob", layout: "Layout") -> str:
    """Say how to run a model in a layout, and write the recipe that is asked for."""
    from nxd_plan import config_call, recipe, save_recipe  # noqa: PLC0415

    told = "" if options.json else f"\n{config_call(job, layout)}\n"
    if options.recipe is not None:
        written = reports_user_errors(lambda: save_recipe(recipe(job, layout), options.recipe))
        told += f"\nwrote {written}: nxd train {written} on {job.num_devices} ranks\n"
    return told


def _run_recipe(
    options: argparse.Namespace,
    settings: Sequence[str],
    planned: "PlannedRecipe",
    job: "TrainingJob",
    layout: "Layout",
) -> str:
    """Say how to run a recipe in a layout, and write the changed one that is asked for."""
    from nxd_plan import changed_keys, save_changed, train_command  # noqa: PLC0415

    changes = changed_keys(planned, job, layout)
    told = f"\non {job.num_devices} ranks: {train_command(options.model, changes, settings)}\n"
    if planned.not_counted:
        told += f"not counted: {', '.join(planned.not_counted)}\n"
    if options.recipe is not None:
        written = reports_user_errors(lambda: save_changed(planned, changes, options.recipe))
        told += f"wrote {written}, the recipe with the keys of this layout\n"
    return told


def _recipe(options: argparse.Namespace, settings: Sequence[str]) -> "PlannedRecipe | None":
    """Return the recipe that takes the place of a model; None if the argument is not a recipe.

    Raises:
        ValueError: it has mistakes, or arguments are given that do not go with it.
    """
    from nxd_plan import read_recipe  # noqa: PLC0415
    from nxd_plan.recipes import SUFFIXES  # noqa: PLC0415

    if options.model is None or options.model.suffix not in SUFFIXES:
        if settings:
            name, _, _ = settings[0].partition("=")
            raise ValueError(
                f"{name} is a recipe's key, but no recipe is given; pass a .toml or .yaml file"
                if "." in name
                else f"unknown argument {name}; nxd plan --help lists those that there are"
            )
        return None
    sizes = [_flag(name) for name in MODEL_FLAGS if getattr(options, name) is not None]
    if sizes:
        raise ValueError(
            f"{', '.join(sizes)} cannot change the model of {options.model}; use the recipe's key, such as "
            "model.hidden_size=1024"
        )
    planned = read_recipe(options.model, settings)
    if options.checkpointing is None:
        return planned
    counted = tuple(it for it in planned.not_counted if not it.startswith("parallel.activation_checkpointing"))
    return replace(planned, kept=(), not_counted=counted)


def _job(options: argparse.Namespace, planned: "PlannedRecipe | None") -> "TrainingJob":
    import torch  # noqa: PLC0415

    from nxd_plan import TrainingJob, find_device, planned_model  # noqa: PLC0415

    numbers = {
        field: None if (given := getattr(options, name)) is None else given * unit
        for name, (field, unit, _) in DEVICE_FLAGS.items()
    }
    device = find_device(options.device, **numbers, devices_per_host=options.devices_per_host)
    if planned is None:
        model = planned_model(options.model, {name: getattr(options, name) for name in MODEL_FLAGS})
        settings: dict[str, Any] = {"sequence_length": min(4096, model.max_positions or 4096)}
    else:
        model = planned.model
        settings = {name: getattr(planned, name) for name in JOB_FLAGS}
    given = {name: value for name in JOB_FLAGS if (value := getattr(options, name)) is not None}
    if "dtype" in given:
        given["dtype"] = getattr(torch, options.dtype)
    return TrainingJob(model=model, device=device, num_devices=options.devices, **settings | given)


def _degrees(options: argparse.Namespace, planned: "PlannedRecipe | None") -> "FixedDegrees":
    from nxd_plan import FixedDegrees  # noqa: PLC0415

    flags = {field.name: getattr(options, field.name) for field in fields(FixedDegrees)}
    given = {name: YES_NO.get(value, value) for name, value in flags.items() if value is not None}
    if "microbatch_size" in given:
        given.setdefault("num_microbatches", None)  # in the place of the recipe's
    return replace(FixedDegrees() if planned is None else planned.fixed, **given)
