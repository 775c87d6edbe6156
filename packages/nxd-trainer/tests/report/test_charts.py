import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from nxd_pipeline import make_schedule, simulate
from nxd_pipeline.timeline import TracedStep
from nxd_trainer.report.charts import HEIGHT, LEFT, RIGHT, TOP, WIDTH, line_chart, smoothed, timeline_chart


@pytest.mark.parametrize(
    ("values", "log_scale", "labels"),
    [
        ([0.0, 3.7], False, ["0", "1", "2", "3", "4"]),
        ([5.0, 5.0], False, ["4", "6"]),
        ([1e3, 9e3], False, ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]),
        ([-1.0, 1.0], False, ["-1", "-0.5", "0", "0.5", "1"]),
        ([1.6, 3.7], True, ["1", "2", "5"]),
        ([0.01, 150.0], True, ["0.01", "0.1", "1", "10", "100", "1,000"]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(values, log_scale, labels):
    chart = line_chart("Loss", {"training": list(enumerate(values))}, log_scale=log_scale)
    shown = re.findall(r'text-anchor="end">([^<]*)</text>', chart)[:-1]  # the last is a step

    assert shown == labels


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_chart_leaves_out_values_that_are_not_finite(value):
    chart = line_chart("Loss", {"training": [(1, 2.0), (2, value), (3, 1.0)]})

    assert "step 2" not in chart
    assert "step 3: 1" in chart


def test_chart_of_a_long_run_stays_small_and_keeps_the_last_step():
    chart = line_chart("Loss", {"training": [(step, 1 / step) for step in range(1, 100_001)]})

    assert chart.count("<circle") <= 1000
    assert "step 100000: 1e-05" in chart


def test_chart_without_values_is_empty():
    assert line_chart("Loss", {"training": []}) == ""


def points_of(chart):
    """The points of each line, as text in the picture's own units."""
    return [
        [tuple(map(float, point.split(","))) for point in path.split()]
        for path in re.findall(r'<polyline points="([^"]*)"', chart)
    ]


def test_line_runs_between_the_first_and_the_last_tick():
    (line,) = points_of(line_chart("Loss", {"training": [(10, 4.0), (20, 2.0), (30, 0.0)]}))
    bottom = line[-1][1]

    assert line[0] == (LEFT, TOP)
    assert line[1] == ((LEFT + WIDTH - RIGHT) / 2, (TOP + bottom) / 2)
    assert line[2][0] == WIDTH - RIGHT
    assert TOP < bottom < HEIGHT


def test_steps_below_are_the_first_the_middle_and_the_last():
    chart = line_chart("Loss", {"training": [(10, 4.0), (30, 0.0)]})

    assert re.findall(r'text-anchor="(?:start|middle|end)">([^<]*)</text>', chart)[-3:] == ["10", "20", "30"]


def test_names_of_lines_stand_above_where_there_are_several():
    one, two = {"training": [(1, 2.0), (2, 1.0)]}, {"held-out": [(1, 3.0), (2, 2.0)]}

    assert 'class="key"' not in line_chart("Loss", one)
    assert line_chart("Loss", one | two).count('class="key"') == 2
    assert line_chart("Loss", one | two, faint=["training"]).count('stroke-opacity="0.3"') == 1


def test_smooth_curve_is_the_mean_of_neighbors_and_keeps_its_ends():
    points = [(step, float(step % 2)) for step in range(60)]

    assert [smoothed(points)[index] for index in (0, 1, 30, 59)] == [(0, 0.0), (1, 1 / 3), (30, 0.4), (59, 1.0)]


def test_timeline_has_a_lane_per_rank_and_each_computation_at_its_time():
    timeline = simulate(make_schedule("1f1b", pipeline_size=2, num_microbatches=2))
    later = replace(
        timeline,
        spans=tuple(tuple(replace(it, start=it.start + 5, end=it.end + 5) for it in spans) for spans in timeline.spans),
    )

    text = timeline_chart(TracedStep(0, ((0, 3),), (later,), 0.0))

    assert re.findall(r"<div>(rank \d)</div>", text) == ["rank 0", "rank 3"]
    picture = ElementTree.fromstring(re.search(r"<svg.*</svg>", text, flags=re.DOTALL)[0])
    whole = max(span.end for spans in timeline.compute_spans for span in spans)
    drawn = sorted((float(it.get("y")), float(it.get("x")), float(it.get("width"))) for it in picture)
    tops = sorted({top for top, _, _ in drawn})
    assert drawn == sorted(
        (tops[rank], round(span.start / whole * 1000, 2), round((span.end - span.start) / whole * 1000, 2))
        for rank, spans in enumerate(timeline.compute_spans)
        for span in spans
    )
