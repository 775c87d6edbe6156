"""A plan as text: the ranked table, and the quickest layout in detail."""

from collections.abc import Mapping, Sequence

from nxd_trainer.plan.memory import RankMemory
from nxd_trainer.plan.planner import Plan, PlannedLayout
from nxd_trainer.plan.units import gib, seconds

HEADINGS = ("TP", "SP", "PP", "DP", "ZeRO-1", "microbatches", "checkpointing", "memory", "bubble", "step", "MFU")
MEMORY_KINDS = ("parameters", "gradients", "optimizer_state", "buckets", "activations", "logits", "temporaries", "peak")


def render_table(plan: Plan) -> str:
    """The quickest layouts, one to a line, and how many others there are."""
    job = plan.job
    tried = (
        f"{plan.num_fitting} layouts fit, {len(plan.misfits)} need more than the {gib(plan.usable_bytes)} that can be "
        f"used of {gib(job.device.memory_bytes)}, {len(plan.rejected)} are not possible"
    )
    rows = [_row(planned) for planned in plan.best]
    return "\n".join([tried, *_aligned([HEADINGS, *rows])])


def render_detail(planned: PlannedLayout, activation_modes: Mapping[str, int]) -> str:
    """Memory by kind, of the first, the fullest and the last pipeline rank; bytes by axis; the parts of a step's time.

    Args:
        planned: the layout.
        activation_modes: of `planner.activation_modes`.
    """
    time, sent = planned.time, planned.communication
    modes = ", ".join(f"{mode} {gib(number)}" for mode, number in activation_modes.items())
    return "\n".join(
        [
            str(planned.layout),
            *_memory_table(planned.memories),
            f"activations of one layer and microbatch by checkpointing: {modes}",
            f"sent by a rank in a step: TP {gib(sent.tp)}, PP {gib(sent.pp)}, DP {gib(sent.dp)}",
            f"step {seconds(time.seconds)}: pipeline {seconds(time.pipeline)} ({time.bubble:.0%} of it idle), "
            f"gradients and parameters of replicas {seconds(time.data_parallel)}, optimizer {seconds(time.update)}; "
            f"MFU {time.mfu:.0%}",
        ]
    )


def render_rejected(plan: Plan) -> str:
    """All layouts that are not possible or do not fit, with the reason."""
    impossible = [(it.what, it.reason) for it in plan.rejected]
    too_large = [
        (str(it.layout), f"needs {gib(it.memory.peak)}, {gib(it.memory.peak - plan.usable_bytes)} too much")
        for it in plan.misfits
    ]
    return "\n".join(f"{what}: {reason}" for what, reason in (*impossible, *too_large))


def _row(planned: PlannedLayout) -> tuple[str, ...]:
    layout, time = planned.layout, planned.time
    return (
        str(layout.tensor_parallel_size),
        "yes" if layout.sequence_parallel else "no",
        str(layout.pipeline_parallel_size),
        str(layout.data_parallel_size),
        "yes" if layout.zero1 else "no",
        f"{layout.num_microbatches} x {layout.microbatch_size}",
        layout.checkpointing,
        gib(planned.memory.peak),
        f"{time.bubble:.1%}",
        seconds(time.seconds),
        f"{time.mfu:.1%}",
    )


def _memory_table(memories: Sequence[RankMemory]) -> list[str]:
    """A column for the first, the fullest and the last pipeline rank, with their neighbours that need the same."""
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
        [kind.replace("_", " "), *(gib(getattr(memories[first], kind)) for first, _ in shown)] for kind in MEMORY_KINDS
    ]
    return _aligned([headings, *rows])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
