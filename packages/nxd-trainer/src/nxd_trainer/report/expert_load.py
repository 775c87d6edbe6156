"""The load of a run's experts as a PNG, drawn from its records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nxd_trainer.report.loss_curve import FAINT, HELD_OUT, TRAIN, save_picture
from nxd_trainer.report.metrics import StepRecord


def draw_expert_loads(
    records: Sequence[StepRecord],
    file: str | Path,
    *,
    title: str = "Load of experts",
    say: Callable[[str], None] = print,
) -> Path | None:
    """Draw the busiest and the idlest expert over the run, and the load of every expert in the last record.

    Loads are multiples of the mean of their layer: 1 is even.

    Args:
        records: all records of the run, as `read_records` gives them.
        file: the PNG; its folder is created if necessary.
        title: stands above.
        say: is given a line to show if there is nothing to draw or nothing to draw it with.

    Returns:
        The file; None where it could not be drawn.
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


def _loads(tokens_per_expert: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[count * len(layer) / max(1, sum(layer)) for count in layer] for layer in tokens_per_expert]


def _draw_extremes(axes: Any, loads: Sequence[tuple[int, list[list[float]]]]) -> None:
    steps = [step for step, _ in loads]
    for name, pick, color in (("busiest", max, HELD_OUT), ("idlest", min, TRAIN)):
        values = [pick(pick(layer) for layer in layers) for _, layers in loads]
        axes.plot(steps, values, color=color, linewidth=1.5, label=f"{name} expert  {values[-1]:.2f}")
    axes.axhline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlabel("step")
    axes.set_ylabel("tokens, of the mean of the layer")
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
    figure.colorbar(image, ax=axes, label="tokens, of the mean of the layer", extend="max")
