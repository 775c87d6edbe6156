import math

import pytest
from nxd_trainer.report import draw_expert_loads, draw_loss_curve
from nxd_trainer.report.pictures import smoothed

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(monkeypatch):
    """The axes of each figure that is drawn in the test."""
    figures = pytest.importorskip("matplotlib.figure")
    axes = []
    make = figures.Figure.subplots

    def subplots(self):
        axes.append(make(self))
        return axes[-1]

    monkeypatch.setattr(figures.Figure, "subplots", subplots)
    return axes


def test_curve_is_a_png_with_losses_and_resumes(tmp_path, record, drawn):
    records = [
        record(step, held_out_loss=5.0 if step % 10 == 0 else None, resumed_from={11: 10, 26: 25}.get(step))
        for step in range(1, 41)
    ]

    file = draw_loss_curve(records, tmp_path / "new" / "loss.png", title="A run")

    (axes,) = drawn
    losses, smooth, held_out, *resumes = axes.get_lines()
    assert file == tmp_path / "new" / "loss.png"
    assert file.read_bytes().startswith(PNG_SIGNATURE)
    assert losses.get_ydata().tolist() == [r.loss for r in records]
    assert smooth.get_xdata().tolist() == list(range(1, 41))
    assert held_out.get_xdata().tolist() == [10, 20, 30, 40]
    assert [line.get_xdata()[0] for line in resumes] == [10, 25]
    assert axes.get_title(loc="left") == "A run"


def test_resume_is_labelled_with_its_layout(tmp_path, record, drawn):
    draw_loss_curve(
        [record(1), record(2, resumed_from=1, layout="TP 1 x DP 2"), record(3, resumed_from=2)],
        tmp_path / "loss.png",
    )

    assert [text.get_text() for text in drawn[0].texts] == ["resumed at 1\nTP 1 x DP 2", "resumed at 2"]


@pytest.mark.parametrize("losses", [[2.0], [2.0, math.nan, 3.0], [math.nan, math.nan]])
def test_short_or_broken_run_is_drawn_too(tmp_path, record, losses):
    pytest.importorskip("matplotlib")
    records = [record(step, loss=loss) for step, loss in enumerate(losses, start=1)]

    file = draw_loss_curve(records, tmp_path / "loss.png")

    assert file.read_bytes().startswith(PNG_SIGNATURE)


def test_run_without_records_says_so(tmp_path):
    said = []

    assert draw_loss_curve([], tmp_path / "loss.png", say=said.append) is None
    assert said == ["loss curve skipped: no step was logged"]


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, record, without):
    without("matplotlib")
    said = []

    file = draw_loss_curve([record(1)], tmp_path / "loss.png", say=said.append)

    assert file is None
    assert said == ["loss curve skipped: matplotlib is not installed (pip install 'nxd-trainer[report]')"]
    assert list(tmp_path.iterdir()) == []


def test_smoothed_line_stays_a_line():
    line = [3.0 - 0.5 * step for step in range(9)]

    assert smoothed(line, reach=3) == pytest.approx(line)


def test_smoothed_is_the_mean_of_the_neighbours():
    assert smoothed([0.0, 3.0, 0.0, 9.0, 0.0], reach=1) == pytest.approx([0.0, 1.0, 4.0, 3.0, 0.0])
    assert smoothed([0.0, 3.0, 0.0], reach=0) == [0.0, 3.0, 0.0]


def test_picture_of_loads_is_a_png(tmp_path, record):
    pytest.importorskip("matplotlib")
    records = [record(step, tokens_per_expert=[[4, 4 * step], [0, 8]] if step > 1 else None) for step in range(1, 4)]

    file = draw_expert_loads(records, tmp_path / "new" / "experts.png")

    assert file == tmp_path / "new" / "experts.png"
    assert file.read_bytes().startswith(PNG_SIGNATURE)


def test_busiest_expert_is_a_multiple_of_the_mean_of_its_layer(record):
    assert record(1, tokens_per_expert=[[2, 2, 2, 2], [1, 5, 1, 1]]).busiest_expert == 2.5
    assert record(1).busiest_expert is None


def test_run_without_counts_or_matplotlib_has_no_picture_and_says_so(tmp_path, record, without):
    said = []

    assert draw_expert_loads([record(1)], tmp_path / "experts.png", say=said.append) is None
    without("matplotlib")
    assert draw_expert_loads([record(1, tokens_per_expert=[[1, 2]])], tmp_path / "experts.png", say=said.append) is None

    assert said[0] == "load of experts skipped: no step counted their tokens"
    assert "matplotlib is not installed" in said[1]
