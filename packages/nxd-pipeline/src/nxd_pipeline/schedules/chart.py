"""Pictures of a timeline, simulated or measured: a row per pipeline rank, as text or, with matplotlib, as an image."""

from pathlib import Path

from nxd_pipeline.schedules.action import ActionKind
from nxd_pipeline.schedules.timeline import Timeline

COLORS = {
    ActionKind.FORWARD: "#7fb2e5",
    ActionKind.BACKWARD: "#5fae7b",
    ActionKind.BACKWARD_INPUT: "#8ecf9d",
    ActionKind.BACKWARD_WEIGHT: "#f2c879",
}
MEANING = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward, inputs",
    ActionKind.BACKWARD_WEIGHT: "backward, weights",
}
INK = "#1f2937"


def text_chart(timeline: Timeline, *, columns: int = 100) -> str:
    """A line per rank: kind and microbatch of each computation from its start to its end, dots where a rank is idle.

    Computations that are too short for their text are cut; give more `columns` then. Where a rank has several stages,
    those on the first half of the pipeline are in capitals and the others in small letters.
    """
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    num_stages = 1 + max((span.action.stage for spans in timeline.compute_spans for span in spans), default=0)
    lines = []
    for rank, spans in enumerate(timeline.compute_spans):
        line = ["."] * columns
        for span in spans:
            start, end = (round((time - timeline.start) * scale) for time in (span.start, span.end))
            first_half = 2 * span.action.stage < num_stages or num_stages == len(timeline.spans)
            kind = span.action.kind if first_half else span.action.kind.lower()
            line[start:end] = f"{kind}{span.action.microbatch}".ljust(end - start, "-")[: end - start]
        lines.append(f"rank {rank:<3}|{''.join(line)}|\n")
    return "".join(lines)


def save_chart(timeline: Timeline, file: str | Path) -> Path:
    """An image of the timeline, in the format that the file's name ends in; later stages of a rank are paler.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (optional package)
        from matplotlib.patches import Patch  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("pictures of schedules need matplotlib: pip install nxd-pipeline[plot]") from error
    figure = Figure(figsize=(14, 1.2 + 0.5 * len(timeline.spans)), layout="constrained")
    axes = figure.subplots()
    kinds = set()
    for rank, spans in enumerate(timeline.compute_spans):
        stages = sorted({span.action.stage for span in spans})
        for span in spans:
            kinds.add(span.action.kind)
            start, duration = span.start - timeline.start, span.end - span.start
            opacity = 1 - 0.5 * stages.index(span.action.stage) / len(stages)
            color = (COLORS[span.action.kind], opacity)
            axes.barh(rank, duration, left=start, height=0.8, color=color, edgecolor="white", linewidth=0.5)
            if duration > timeline.makespan / 100:
                middle, label = start + duration / 2, str(span.action.microbatch)
                axes.text(middle, rank, label, ha="center", va="center", fontsize=7, color=INK)
    axes.set(xlabel="time", ylabel="pipeline rank", yticks=range(len(timeline.spans)))
    axes.set_title(f"{timeline.name}: {timeline.bubble_fraction:.1%} of the time idle", color=INK)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    legend = [Patch(color=COLORS[kind], label=MEANING[kind]) for kind in MEANING if kind in kinds]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.savefig(file, dpi=150)
    return Path(file)
