"""The loss curve of a run as a PNG, and what saves pictures, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nxd_trainer.report.metrics import StepRecord, missing_extra

RESUME_LABEL_HEIGHT = 0.6  # of the axes: above a falling curve, below the legend
TRAIN, HELD_OUT, INK, FAINT = "#2563eb", "#ea580c", "#1f2937", "#9ca3af"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
    "legend.frameon": False,
}


def draw_loss_curve(
    records: Sequence[StepRecord],
    file: str | Path,
    *,
    title: str = "Training loss",
    say: Callable[[str], None] = print,
) -> Path | None:
    """Draw training loss, its mean over neighboring records, held-out loss, and a line at each resume.

    Args:
        records: all records of the run, as `read_records` gives them.
        file: the PNG; its folder is created if necessary.
        title: stands above the curve.
        say: is given a line to show if there is nothing to draw or nothing to draw it with.

    Returns:
        The file; None where it could not be drawn.
    """
    if not records:
        say("loss curve skipped: no step was logged")
        return None
    return save_picture(
        file, lambda figure: _draw(figure.subplots(), records, title), size=(8, 4.5), purpose="loss curve", say=say
    )


def save_picture(
    file: str | Path,
    paint: Callable[[Any], None],
    *,
    size: tuple[float, float],
    purpose: str,
    say: Callable[[str], None],
) -> Path | None:
    """Save what `paint` draws on a figure of matplotlib.

    Args:
        file: the PNG; its folder is created if necessary.
        paint: draws.
        size: size of the figure, in inches.
        purpose: purpose of the figure, for the message about a missing matplotlib.
        say: is given that line.

    Returns:
        The file; None where it could not be drawn.
    """
    try:
        from matplotlib import rc_context  # noqa: PLC0415  (optional package)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        say(missing_extra("matplotlib", purpose))
        return None
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        # A bare Figure saves through Agg, whatever backend the process uses, and needs no display.
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.savefig(file, dpi=160)
    return file


def smoothed(values: Sequence[float], *, reach: int) -> list[float]:
    """The mean of each value and up to `reach` neighbors on either side, as many on the one as on the other.

    The window is symmetric up to both ends, so that the smooth curve neither lags nor bends away there.
    """
    means = []
    for position in range(len(values)):
        near = min(reach, position, len(values) - 1 - position)
        window = values[position - near : position + near + 1]
        means.append(sum(window) / len(window))
    return means


def _draw(axes: Any, records: Sequence[StepRecord], title: str) -> None:
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    smooth = smoothed(losses, reach=len(losses) // 30)
    axes.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=1)
    axes.plot(steps, smooth, color=TRAIN, linewidth=2, label=f"train (smoothed)  {smooth[-1]:.3f}")
    held_out = [(record.step, record.held_out_loss) for record in records if record.held_out_loss is not None]
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True),
            color=HELD_OUT,
            linewidth=1.5,
            marker="o",
            markersize=4,
            label=f"held-out  {held_out[-1][1]:.3f}",
        )
    _mark_resumes(axes, records)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.01)
    axes.legend(loc="upper right")


def _mark_resumes(axes: Any, records: Sequence[StepRecord]) -> None:
    for record in records:
        if record.resumed_from is None:
            continue
        axes.axvline(record.resumed_from, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"resumed at {record.resumed_from}" + (f"\n{record.layout}" if record.layout else ""),
            xy=(record.resumed_from, RESUME_LABEL_HEIGHT),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            fontsize=8,
            color="#6b7280",
        )
