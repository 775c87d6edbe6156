"""Renders a plan: as text (ranked table, details of the fastest layout, advice if none fits), as JSON, or as code.

The code is a `neuronx_distributed_config(...)` call; `recipes` writes a layout as a recipe for `nxd train`.
"""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nxd_cli.output import show_memory, show_seconds
from nxd_engine.config import complete_config
from nxd_engine.training_config import training_config
from nxd_pipeline import NxDPPModel

from nxd_plan.layout import ON_XLA, FixedDegrees, Layout, TrainingJob
from nxd_plan.memory import RankMemory
from nxd_plan.planner import Plan, PlannedLayout, TooLarge

HEADINGS = (
    *("TP", "SP", "PP", "CP", "EP", "DP", "ZeRO", "microbatches", "checkpointing"),
    *("memory", "bubble", "step", "MFU"),
)
MEMORY_KINDS = (
    *("parameters", "gathered", "gradients", "optimizer_state", "buckets", "activations", "logits", "temporaries"),
    "peak",
)


def render_table(plan: Plan) -> str:
    """Return what was planned, the fastest layouts, one per line, and how many others there are."""
    job = plan.job
    planned = (
        f"planned: {job.dtype_name} weights{_faster_dtype(job)}, {job.global_batch_size} sequences of "
        f"{job.sequence_length} tokens in a step"
    )
    tried = (
        f"{plan.num_fitting} layouts fit, {len(plan.too_large)} need more than the {show_memory(plan.usable_bytes)} "
        f"usable of {show_memory(job.device.memory_bytes)}, {len(plan.rejected)} are not possible"
    )
    rows = [_row(planned) for planned in plan.best]
    return "\n".join([planned, tried, *_aligned([HEADINGS, *rows])])


def _faster_dtype(job: TrainingJob) -> str:
    """Return a remark on the dtype in which the device computes fastest, if it is another one."""
    fastest = max(job.device.flops, key=job.device.flops_of)
    times = job.device.flops_of(fastest) / job.device.flops_of(job.dtype_name)
    return f" ({job.device.name} multiplies matrices {times:.0f} times as fast in {fastest})" if times >= 2 else ""


def render_detail(planned: PlannedLayout, activation_modes: Mapping[str, int]) -> str:
    """Return the memory of the first, fullest and last pipeline rank, bytes by axis, and parts of the step time."""
    time, sent = planned.time, planned.communication
    modes = ", ".join(f"{mode} {show_memory(number)}" for mode, number in activation_modes.items())
    return "\n".join(
        [
            str(planned.layout),
            *_memory_table(planned.memories),
            f"activations per layer and microbatch, by checkpointing: {modes}",
            f"sent per rank and step: TP {show_memory(sent.tp)}, PP {show_memory(sent.pp)}, "
            f"DP {show_memory(sent.dp)}{f' and {show_memory(sent.mirrors)} to mirrors' if sent.mirrors else ''}"
            f"{f', {show_memory(sent.near)} to near ranks' if sent.near else ''}"
            f"{f', CP {show_memory(sent.cp)}' if sent.cp else ''}"
            f"{f', EP {show_memory(sent.ep)}' if sent.ep else ''}",
            f"step {show_seconds(time.seconds)}: pipeline {show_seconds(time.pipeline)} "
            f"({time.bubble:.0%} of it idle), gradients and parameters across replicas "
            f"{show_seconds(time.data_parallel)}, optimizer {show_seconds(time.update)}; MFU {time.mfu:.0%}",
        ]
    )


def render_rejected(plan: Plan) -> str:
    """Return all layouts that are not possible or do not fit, with the reasons."""
    impossible = [(it.what, it.reason) for it in plan.rejected]
    too_large = [
        (
            str(it.layout),
            f"needs {show_memory(it.memory.peak)}, {show_memory(it.memory.peak - plan.usable_bytes)} too much",
        )
        for it in plan.too_large
    ]
    return "\n".join(f"{what}: {reason}" for what, reason in (*impossible, *too_large))


def _row(planned: PlannedLayout) -> tuple[str, ...]:
    layout, degrees, time = planned.layout, planned.layout.degrees, planned.time
    return (
        str(degrees.tp),
        "yes" if degrees.sequence_parallel else "no",
        str(degrees.pp),
        str(degrees.cp),
        str(degrees.ep),
        str(degrees.dp),
        f"{degrees.zero_stage}{f' over {degrees.shard_group_size}' if degrees.shard_group_size else ''}",
        f"{layout.num_microbatches} x {layout.microbatch_size}",
        layout.checkpointing,
        show_memory(planned.memory.peak),
        f"{time.bubble:.1%}",
        show_seconds(time.seconds),
        f"{time.mfu:.1%}",
    )


def _memory_table(memories: Sequence[RankMemory]) -> list[str]:
    """Return columns for the first, fullest and last pipeline rank, each with neighbors that need the same."""
    runs: list[tuple[int, int]] = []
    for rank, memory in enumerate(memories):
        if runs and memories[runs[-1][0]] == memory:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    most = max(range(len(memories)), key=lambda rank: memories[rank].peak)
    shown = sorted({runs[0], *(run for run in runs if run[0] <= most <= run[1]), runs[-1]})
    headings = ["memory"] + [
        f"PP rank {first}" if first == last else f"PP ranks {first}-{last}" for first, last in shown
    ]
    rows = [
        [kind.replace("_", " "), *(show_memory(getattr(memories[first], kind)) for first, _ in shown)]
        for kind in MEMORY_KINDS
        if kind != "gathered" or any(memory.gathered for memory in memories)
    ]
    return _aligned([headings, *rows])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def explain_no_fit(plan: Plan, fixed: FixedDegrees) -> str:
    """Describe a plan in which nothing fits: the closest layout, and ways to make it fit."""
    if not plan.too_large:
        reasons = [f"  {rejected.what}: {rejected.reason}" for rejected in plan.rejected]
        return "\n".join(["no layout is possible:", *reasons])
    nearest = min(plan.too_large, key=lambda it: it.memory.peak)
    missing = nearest.memory.peak - plan.usable_bytes
    lines = [
        f"no layout fits on {plan.job.num_devices} x {plan.job.device.name}. The closest is {nearest.layout}:",
        f"  it needs {show_memory(nearest.memory.peak)} on each device, {show_memory(missing)} more than the usable "
        f"{show_memory(plan.usable_bytes)}",
        "What would help:",
        *(f"  - {way}" for way in _ways_out(plan, fixed, nearest)),
    ]
    return "\n".join(lines)


def _ways_out(plan: Plan, fixed: FixedDegrees, nearest: TooLarge) -> list[str]:
    memory, layout, ways = nearest.memory, nearest.layout, []
    held = [f"--{name.replace('_', '-')}" for name, value in vars(fixed).items() if value is not None]
    if held:
        ways.append(f"leave out {', '.join(held)}")
    if memory.states > plan.usable_bytes:
        factor = math.ceil(memory.states / plan.usable_bytes)
        ways.append(
            f"at least {factor} times as many devices: parameters, gradients and optimizer state alone need "
            f"{show_memory(memory.states)} per rank"
        )
    else:
        enough = memory.peak / plan.usable_bytes * plan.job.device.memory_bytes
        ways.append(f"more devices, or devices with {show_memory(enough)}")
    if memory.activations + memory.logits + memory.temporaries > memory.states:
        ways.append(
            f"shorter sequences: activations, logits and temporaries need {show_memory(memory.peak - memory.states)} "
            f"for sequences of {plan.job.sequence_length} tokens"
        )
    if layout.degrees.replicas > 1:
        ways += _further_sharding(plan.job, fixed, layout)
    return ways


def _further_sharding(job: TrainingJob, fixed: FixedDegrees, layout: Layout) -> list[str]:
    """Return the flags with which more is sharded over the replicas."""
    ways, stage = [], layout.degrees.zero_stage
    if not stage:
        ways.append("--zero-stage 1: shards the optimizer state over the replicas")
    if stage < 3 and job.device.name not in ON_XLA:
        ways.append("--zero-stage 3: shards also gradients and parameters over the replicas, and sends more")
    if layout.reshard_after_forward is False:
        ways.append("--reshard-after-forward yes: gives parameters up between their forward and backward")
    if fixed.shard_group_size is not None and fixed.shard_group_size < layout.degrees.replicas:
        ways.append(f"--shard-group-size {layout.degrees.replicas}: shards over all replicas")
    return ways


def plan_as_json(plan: Plan) -> str:
    """Return the fastest layouts, fastest first, and why the others are not among them, as JSON.

    Memory and messages are in bytes, `memory` per pipeline rank; times are in seconds.
    """
    job = plan.job
    content = {
        "device": job.device.name,
        "num_devices": job.num_devices,
        "sequence_length": job.sequence_length,
        "global_batch_size": job.global_batch_size,
        "dtype": job.dtype_name,
        "schedule": job.schedule,
        "usable_bytes": int(plan.usable_bytes),
        "num_fitting": plan.num_fitting,
        "best": [_planned(it) for it in plan.best],
        "too_large": [{"layout": it.layout.as_dict(), "memory": asdict(it.memory)} for it in plan.too_large],
        "not_possible": [asdict(it) for it in plan.rejected],
    }
    return json.dumps(content, indent=2)


def _planned(planned: PlannedLayout) -> dict[str, Any]:
    return {
        "layout": planned.layout.as_dict(),
        "memory": [asdict(memory) for memory in planned.memories],
        "sent_bytes": asdict(planned.communication),
        "time": {"step": planned.time.seconds, **asdict(planned.time)},
    }


def config_call(job: TrainingJob, layout: Layout) -> str:
    """Return Python that creates the model in this layout; it needs imports of `nxd`, `torch` and the model."""
    parallel = layout.degrees.sequence_parallel
    arguments = training_config(
        job.model.spec(job.dtype, sequence_parallel=parallel),
        layout.degrees,
        num_microbatches=layout.num_microbatches,
        schedule=job.schedule,
        activation_checkpointing=layout.checkpointing,
        reshard_after_forward=None if layout.reshard_after_forward is True else layout.reshard_after_forward,
    )
    lines = [*job.model.config_lines(job.dtype_name), "nxd_config = nxd.neuronx_distributed_config("]
    lines += [f"    {name}={value}," for name, value in _not_by_default(arguments).items()]
    given = ", ".join(["nxd_config", *job.model.model_arguments(job.dtype_name, sequence_parallel=parallel)])
    return "\n".join([*lines, ")", f"model = nxd.initialize_parallel_model({given})"])


def _not_by_default(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that differ from their defaults, as Python; sections have their changed keys only."""
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
