"""Charts as SVG text for HTML pages: lines over steps, and the bars of a pipeline's timeline.

They take the page's text color and have no scripts of their own.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from nxd_pipeline import ActionKind
from nxd_pipeline.timeline import TracedStep

Points = Sequence[tuple[float, float]]  # x, y

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 12, 28
COLORS = ("#3f6fb5", "#c2652a", "#3c8a4e", "#8a4fa3")
MOST_POINTS = 1000  # of a line; a longer one is drawn by every n-th point, so that the page of a long run stays small
LANE = 26  # pixels between the lanes of a timeline
COMPUTED = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


def line_chart(title: str, series: Mapping[str, Points], *, log_scale: bool = False) -> str:
    """Return a chart of lines over steps.

    Args:
        title: the chart's heading, with the unit.
        series: the points of each line by its name; those that are not finite are left out.
        log_scale: whether the y axis is logarithmic, which needs positive values.
    """
    drawn = {name: [point for point in points if math.isfinite(point[1])] for name, points in series.items()}
    drawn = {name: _thinned(points) for name, points in drawn.items() if points}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    log_scale = log_scale and min(ys) > 0
    low, high = _range(ys, log_scale=log_scale)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - min(xs)) / ((max(xs) - min(xs)) or 1)
        up = (_scaled(y, log_scale) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_axes(min(xs), max(xs), low, high, log_scale=log_scale)]
    for color, (name, points) in zip(COLORS, drawn.items(), strict=False):
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [
            f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3" fill="{color}" fill-opacity="{int(len(points) == 1)}">'
            f"<title>{escape(name)}, step {x:g}: {y:.6g}</title></circle>"
            for at, (x, y) in zip(placed, points, strict=True)
        ]
    legend = " ".join(
        f'<span style="color:{color}">{escape(name)}</span>' for color, name in zip(COLORS, drawn, strict=False)
    )
    figure = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)} {legend if len(drawn) > 1 else ''}</figcaption>{figure}</figure>"


def timeline_chart(step: TracedStep) -> str:
    """Return the computations of each pipeline rank in one step; a lane per rank, time from left to right."""
    lanes = [
        (rank, spans)
        for ranks, timeline in zip(step.pipelines, step.timelines, strict=True)
        for rank, spans in zip(ranks, timeline.compute_spans, strict=True)
    ]
    start = min(span.start for _, spans in lanes for span in spans)
    length = max(span.end for _, spans in lanes for span in spans) - start
    parts = []
    for lane, (rank, spans) in enumerate(lanes):
        top = lane * LANE
        parts.append(f'<text x="-8" y="{top + 17}" text-anchor="end">rank {rank}</text>')
        for span in spans:
            x, width = (span.start - start) / length * 1000, (span.end - span.start) / length * 1000
            label = (
                f"{span.action.kind.label}, stage {span.action.stage}, microbatch {span.action.microbatch}: "
                f"{(span.end - span.start) * 1000:.3g} ms"
            )
            parts.append(
                f'<rect x="{x:.2f}" y="{top + 3}" width="{width:.2f}" height="{LANE - 6}" '
                f'fill="{COLORS[COMPUTED.index(span.action.kind)]}"><title>{escape(label)}</title></rect>'
            )
    kinds = [kind for kind in COMPUTED if any(span.action.kind == kind for _, spans in lanes for span in spans)]
    legend = " ".join(f'<span style="color:{COLORS[COMPUTED.index(kind)]}">{kind.label}</span>' for kind in kinds)
    shape = f'viewBox="-70 0 1080 {len(lanes) * LANE}" preserveAspectRatio="none" height="{len(lanes) * LANE}"'
    figure = f'<svg class="timeline" {shape} role="img" aria-label="timeline of a step">{"".join(parts)}</svg>'
    return f"<p>{legend}</p>{figure}"


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most about `MOST_POINTS` of the points, evenly chosen, with the last one."""
    return points[:: -(len(points) // MOST_POINTS + 1)][::-1]


def _scaled(value: float, log_scale: bool) -> float:
    return math.log10(value) if log_scale else value


def _range(values: Sequence[float], *, log_scale: bool) -> tuple[float, float]:
    """Return the ends of the y axis, a little beyond the values."""
    low, high = (_scaled(end, log_scale) for end in (min(values), max(values)))
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def _axes(first: float, last: float, low: float, high: float, *, log_scale: bool) -> str:
    """Return the grid: three steps below, four values at the left."""
    parts = []
    for index in range(4):
        y = HEIGHT - BOTTOM - index / 3 * (HEIGHT - TOP - BOTTOM)
        value = low + index / 3 * (high - low)
        label = f"{10**value if log_scale else value:.3g}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        step = round(first + share * (last - first))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:,}</text>')
    return "".join(parts)
