"""Pictures of a timeline, simulated or measured: a row per pipeline rank, as text or, with matplotlib, as an image."""

from pathlib import Path
from typing import Literal

from nxd_pipeline.schedules.schedule import ActionKind
from nxd_pipeline.schedules.simulation import Timeline

COLORS = {
    ActionKind.FORWARD: "#7fb2e5",
    ActionKind.BACKWARD: "#5fae7b",
    ActionKind.BACKWARD_INPUT: "#8ecf9d",
    ActionKind.BACKWARD_WEIGHT: "#f2c879",
}
INK = "#1f2937"


def text_chart(timeline: Timeline, *, columns: int = 100) -> str:
    """Draw a line per rank: kind and microbatch of each computation from its start to its end, dots for idle time.

    Computations that are too short for their text are cut; pass more `columns` then. If a rank has several stages,
    those in the first half of the pipeline are in capitals and the others in small letters.
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


def save_chart(
    timeline: Timeline,
    file: str | Path,
    *,
    lanes: Literal["rank", "stage"] = "rank",
    title: str | None = None,
    unit: str = "",
) -> Path:
    """Save an image of the timeline, in the format of the file's suffix; later stages of a rank are paler.

    Args:
        timeline: a simulated or measured timeline.
        file: path of the image; an existing file is replaced.
        lanes: "rank" for a row per rank, or "stage" for a row per stage.
        title: title; the timeline's name and idle time if None.
        unit: unit of the times.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  (optional package)
        from matplotlib.patches import Patch  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("pictures of schedules need matplotlib: pip install nxd-pipeline[plot]") from error
    places = {  # row and opacity of each stage
        stage: (rank, 1 - 0.5 * index / len(stages))
        for rank, spans in enumerate(timeline.compute_spans)
        for stages in [sorted({span.action.stage for span in spans})]
        for index, stage in enumerate(stages)
    }
    labels = [f"rank {rank}" for rank in range(len(timeline.spans))]
    if lanes == "stage":
        labels = [f"rank {rank}, stage {stage}" for stage, (rank, _) in places.items()]
        places = {stage: (row, opacity) for row, (stage, (_, opacity)) in enumerate(places.items())}
    figure = Figure(figsize=(14, 1.2 + 0.5 * len(labels)), layout="constrained")
    axes = figure.subplots()
    bars: dict[tuple[int, ActionKind], list[tuple[float, float]]] = {}  # by stage and kind, for speed
    for span in (span for spans in timeline.compute_spans for span in spans):
        start, duration = span.start - timeline.start, span.end - span.start
        bars.setdefault((span.action.stage, span.action.kind), []).append((start, duration))
        if duration > timeline.makespan / 100:
            middle, (row, _), label = start + duration / 2, places[span.action.stage], str(span.action.microbatch)
            axes.text(middle, row, label, ha="center", va="center", fontsize=7, color=INK)
    for (stage, kind), extents in bars.items():
        row, opacity = places[stage]
        color = (COLORS[kind], opacity)
        axes.broken_barh(extents, (row - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.5)
    axes.set(xlabel=f"time, {unit}" if unit else "time", yticks=range(len(labels)), yticklabels=labels)
    axes.set_title(title or f"{timeline.name}: {timeline.bubble_fraction:.1%} of the time idle", color=INK)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    kinds = {kind for _, kind in bars}
    legend = [Patch(color=COLORS[kind], label=kind.label) for kind in COLORS if kind in kinds]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.savefig(file, dpi=150)
    return Path(file)
