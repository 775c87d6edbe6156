"""The pictures of a run, drawn from its records with matplotlib if that is installed: loss curve and expert load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nxd_trainer.report.metrics import StepRecord

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
    """Draw the training loss, its moving mean, the held-out loss, and a line at each resume.

    Args:
        records: all records of the run, from `read_records`.
        file: the PNG to write; its folder is created if missing.
        title: title of the picture.
        say: function that logs a line if there are no records or matplotlib is missing.

    Returns:
        The file; None if it was not drawn.
    """
    if not records:
        say("loss curve skipped: no step was logged")
        return None
    return save_picture(
        file,
        lambda figure: _draw_losses(figure.subplots(), records, title),
        size=(8, 4.5),
        purpose="loss curve",
        say=say,
    )


def draw_expert_loads(
    records: Sequence[StepRecord],
    file: str | Path,
    *,
    title: str = "Load of experts",
    say: Callable[[str], None] = print,
) -> Path | None:
    """Draw the load of the busiest and the idlest expert over the run, and that of all experts in the last record.

    Loads are multiples of the layer's mean: 1 is even. Arguments and result are as for `draw_loss_curve`.
    """
    loads = [(record.step, _loads(record.tokens_per_expert)) for record in records if record.tokens_per_expert]
    if not loads:
        say("load of experts skipped: no step counted their tokens")
        return None

    def paint(figure: Any) -> None:
        over_time, at_end = figure.subplots(1, 2)
        _draw_extremes(over_time, loads)
        _draw_last(figure, at_end, *loads[-1])
        over_time.set_title(title, loc="left", fontweight="bold", fontsize=12)

    return save_picture(file, paint, size=(10, 4), purpose="load of experts", say=say)


def save_picture(
    file: str | Path,
    paint: Callable[[Any], None],
    *,
    size: tuple[float, float],
    purpose: str,
    say: Callable[[str], None],
) -> Path | None:
    """Save what `paint` draws on a figure of this size, in inches; None if matplotlib is not installed."""
    try:
        from matplotlib import rc_context  # noqa: PLC0415 - optional
        from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    except ImportError:
        say(f"{purpose} skipped: matplotlib is not installed (pip install 'nxd-trainer[report]')")
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
    """Return the mean of each value and up to `reach` neighbors on either side, equally many on both.

    The window stays symmetric at the ends, so the smooth curve neither lags nor bends there.
    """
    means = []
    for position in range(len(values)):
        near = min(reach, position, len(values) - 1 - position)
        window = values[position - near : position + near + 1]
        means.append(sum(window) / len(window))
    return means


def _draw_losses(axes: Any, records: Sequence[StepRecord], title: str) -> None:
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


def _loads(tokens_per_expert: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[count * len(layer) / max(1, sum(layer)) for count in layer] for layer in tokens_per_expert]


def _draw_extremes(axes: Any, loads: Sequence[tuple[int, list[list[float]]]]) -> None:
    steps = [step for step, _ in loads]
    for name, pick, color in (("busiest", max, HELD_OUT), ("idlest", min, TRAIN)):
        values = [pick(pick(layer) for layer in layers) for _, layers in loads]
        axes.plot(steps, values, color=color, linewidth=1.5, label=f"{name} expert  {values[-1]:.2f}")
    axes.axhline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlabel("step")
    axes.set_ylabel("tokens, relative to the layer's mean")
    axes.set_ylim(bottom=0)
    axes.legend(loc="best")


def _draw_last(figure: Any, axes: Any, step: int, layers: list[list[float]]) -> None:
    image = axes.imshow(layers, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    axes.grid(visible=False)
    axes.set_title(f"step {step}", loc="left", fontsize=10)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer with experts")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label="tokens, relative to the layer's mean", extend="max")
