"""Charts as SVG text for HTML pages: lines over steps, and the bars of a pipeline's timeline.

They take the page's text color and have no scripts of their own.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from itertools import accumulate

from nxd_pipeline import ActionKind
from nxd_pipeline.timeline import TracedStep

Points = Sequence[tuple[float, float]]  # x, y

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 12, 28
COLORS = ("#4a86d8", "#d0702e", "#3f9c56", "#9a62bd", "#b8901f", "#7d8590")  # readable on white and on black
MOST_POINTS = 1000  # of a line; a longer one is drawn by every n-th point, so that the page of a long run stays small
LANE = 26  # pixels between the lanes of a timeline
COMPUTED = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)


def line_chart(
    title: str,
    series: Mapping[str, Points],
    *,
    log_scale: bool = False,
    faint: Collection[str] = (),
    marks: Collection[int] = (),
) -> str:
    """Return a chart of lines over steps.

    Args:
        title: the chart's heading, with the unit.
        series: the points of each line by its name; those that are not finite are left out.
        log_scale: whether the y axis is logarithmic, which needs positive values.
        faint: names of lines in the background.
        marks: steps at which the run resumed.
    """
    drawn = {name: [point for point in points if math.isfinite(point[1])] for name, points in series.items()}
    drawn = {name: _thinned(points) for name, points in drawn.items() if points}
    if not drawn:
        return ""
    xs = [x for points in drawn.values() for x, _ in points]
    ys = [y for points in drawn.values() for _, y in points]
    log_scale = log_scale and min(ys) > 0
    ticks = _log_ticks(min(ys), max(ys)) if log_scale else _ticks(min(ys), max(ys))
    low, high = (_scaled(tick, log_scale) for tick in (ticks[0], ticks[-1]))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - min_x) / ((max_x - min_x) or 1)
        up = (_scaled(y, log_scale) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    min_x, max_x = min(xs), max(xs)
    parts = [_axes(min_x, max_x, [(tick, place(min_x, tick)[1]) for tick in ticks])]
    parts += [
        f'<line x1="{place(step, ticks[0])[0]:.1f}" x2="{place(step, ticks[0])[0]:.1f}" y1="{TOP}" '
        f'y2="{HEIGHT - BOTTOM}" class="mark"><title>resumed at step {step}</title></line>'
        for step in marks
        if min_x <= step <= max_x
    ]
    colors = dict(zip([name for name in drawn if name not in faint], COLORS, strict=False))
    colors |= {name: "currentColor" for name in drawn if name in faint}
    for name, points in sorted(drawn.items(), key=lambda item: item[0] not in faint):
        color = colors[name]
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        opacity = 0.3 if name in faint else 1
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-opacity="{opacity}"/>')
        parts += [
            f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="3" fill="{color}" fill-opacity="{int(len(points) == 1)}">'
            f"<title>{escape(name)}, step {x:g}: {y:.6g}</title></circle>"
            for at, (x, y) in zip(placed, points, strict=True)
        ]
    legend = legend_of(colors) if len(drawn) > 1 else ""
    figure = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)} {legend}</figcaption>{figure}</figure>"


def legend_of(colors: Mapping[str, str]) -> str:
    """Return the names beside their colors."""
    return " ".join(
        f'<span class="key" style="border-color:{color}">{escape(name)}</span>' for name, color in colors.items()
    )


def smoothed(points: Points) -> Points:
    """Return the mean of each value and its neighbors, a thirtieth of the points on either side.

    At the ends there are fewer neighbors, equally many on both sides, so the smooth curve neither lags nor bends there.
    """
    points = [point for point in points if math.isfinite(point[1])]
    sums = [0.0, *accumulate(y for _, y in points)]
    reaches = (min(len(points) // 30, index, len(points) - 1 - index) for index in range(len(points)))
    return [
        (x, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1))
        for index, ((x, _), reach) in enumerate(zip(points, reaches, strict=True))
    ]


def timeline_chart(step: TracedStep) -> str:
    """Return the computations of each pipeline rank in one step; a lane per rank, time from left to right."""
    lanes = [
        (rank, spans)
        for ranks, timeline in zip(step.pipelines, step.timelines, strict=True)
        for rank, spans in zip(ranks, timeline.compute_spans, strict=True)
    ]
    start = min(span.start for _, spans in lanes for span in spans)
    length = max(span.end for _, spans in lanes for span in spans) - start
    parts, labels = [], []
    for lane, (rank, spans) in enumerate(lanes):
        top = lane * LANE
        labels.append(f"<div>rank {rank}</div>")
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
    legend = legend_of({kind.label: COLORS[COMPUTED.index(kind)] for kind in kinds})
    shape = f'viewBox="0 0 1000 {len(lanes) * LANE}" preserveAspectRatio="none" height="{len(lanes) * LANE}"'
    figure = f'<svg class="timeline" {shape} role="img" aria-label="timeline of a step">{"".join(parts)}</svg>'
    return f'<p>{legend}</p><div class="lanes"><div>{"".join(labels)}</div>{figure}</div>'


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most about `MOST_POINTS` of the points, evenly chosen, with the last one."""
    return points[:: -(len(points) // MOST_POINTS + 1)][::-1]


def _scaled(value: float, log_scale: bool) -> float:
    return math.log10(value) if log_scale else value


def _ticks(low: float, high: float) -> list[float]:
    """Return three to seven round values around a range, evenly spaced."""
    span = high - low or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 3))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    if first == last:
        first, last = first - 1, last + 1
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten around a range; of a range within one, or two, also the values between."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = -(-(last - first) // 6)
    if last - first > 2:
        return [10.0**power for power in range(first, last + every, every)]
    between = [factor * 10.0**power for power in range(first, last) for factor in (1, 2, 5)] + [10.0**last]
    start = max(index for index, tick in enumerate(between) if tick <= low)
    end = min(index for index, tick in enumerate(between) if tick >= high)
    return between[start : max(end, start + 1) + 1]


def _axes(first: float, last: float, ticks: Sequence[tuple[float, float]]) -> str:
    """Return the grid: three steps below, and the values at their heights at the left."""
    parts = []
    for value, y in ticks:
        label = f"{value:,.0f}" if abs(value) >= 1000 and value == round(value) else f"{value:.4g}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        step = round(first + share * (last - first))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:,}</text>')
    return "".join(parts)
