import sys

import pytest
from nxd_pipeline.schedules import (
    custom_schedule,
    insert_communication,
    make_schedule,
    save_chart,
    simulate,
    text_chart,
)


def test_text_chart_shows_each_computation_from_start_to_end():
    timeline = simulate(insert_communication(make_schedule("1f1b", 2, 2)))

    assert text_chart(timeline, columns=27).splitlines() == [
        "rank 0  |F0-F1-......B0----...B1----|",
        "rank 1  |...F0-B0----F1-B1----......|",
    ]


def test_text_chart_of_several_stages_per_rank_writes_the_second_half_small():
    timeline = simulate(make_schedule("zb-v", 1, 1))

    assert text_chart(timeline, columns=12) == "rank 0  |F0f0i0w0I0W0|\n"


def test_text_chart_of_a_single_action_fills_the_line():
    assert text_chart(simulate(custom_schedule([["0F0"]])), columns=5) == "rank 0  |F0---|\n"


def test_save_chart_writes_an_image(tmp_path):
    pytest.importorskip("matplotlib")

    file = save_chart(simulate(make_schedule("dualpipe-v", 2, 4)), tmp_path / "chart.png")

    assert file.read_bytes().startswith(b"\x89PNG")


def test_save_chart_without_matplotlib_raises_saying_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ImportError, match=r"need matplotlib: pip install nxd-pipeline\[plot\]"):
        save_chart(simulate(make_schedule("1f1b", 2, 4)), tmp_path / "chart.png")
