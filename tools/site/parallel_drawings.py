"""Draws schedules and kinds of parallelism as SVG, from the objects that the packages run on.

    python tools/site/parallel_drawings.py

writes all of them to docs/pictures, where a test compares them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from nxd_layers.context import SequenceCut
from nxd_pipeline import Costs, StageCost, make_schedule, simulate
from nxd_pipeline.partition.cuts import even_cuts
from nxd_pipeline.schedules.simulation import COLORS, INK, Timeline

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
ROW, LABEL = 26, 64  # pixels: the height of a rank's row, the width of its label
WIDTH = 800
KEPT, ABSENT = "#7fb2e5", "#eef1f5"
Cells = Mapping[str, bool | str]  # by the text in the cell: whether the rank has it, or its color


def drawings() -> dict[str, str]:
    """Return the text of every drawing by its file name."""
    return {name: draw() for name, draw in DRAWINGS.items()}


def schedule(name: str, *, stages_per_rank: int = 1) -> str:
    """Return a schedule's timeline on 4 ranks with 8 microbatches."""
    share = 1 / stages_per_rank
    costs = Costs(StageCost(forward=share, backward_input=share, backward_weight=share))
    return timeline(simulate(make_schedule(name, pipeline_size=4, num_microbatches=8), costs))


def timeline(of: Timeline) -> str:
    """Return a row for each rank with its computations; later stages of a rank are paler."""
    scale = (WIDTH - LABEL - 8) / of.makespan
    shapes = []
    for rank, spans in enumerate(of.compute_spans):
        shapes.append(_text(4, rank * ROW + 17, f"rank {rank}", anchor="start"))
        stages = sorted({span.action.stage for span in spans})
        for span in spans:
            left, right = (LABEL + (time - of.start) * scale for time in (span.start, span.end))
            opacity = 1 - 0.5 * stages.index(span.action.stage) / len(stages)
            shapes.append(_box(left, rank * ROW + 3, right - left, COLORS[span.action.kind], opacity))
            shapes.append(_text((left + right) / 2, rank * ROW + 17, str(span.action.microbatch)))
    return _svg(len(of.compute_spans) * ROW + 4, f"{of.name}: {of.bubble_fraction:.0%} of the time idle", shapes)


def parts(title: str, rows: Mapping[str, Cells]) -> str:
    """Return a row of cells for each rank; those that the rank has are colored."""
    shapes = []
    for row, (label, cells) in enumerate(rows.items()):
        shapes.append(_text(4, row * ROW + 17, label, anchor="start"))
        width = (WIDTH - LABEL - 8) / len(cells)
        for column, (text, kept) in enumerate(cells.items()):
            color = kept if isinstance(kept, str) else KEPT if kept else ABSENT
            left = LABEL + column * width
            shapes.append(_box(left, row * ROW + 3, width, color))
            if kept:
                shapes.append(_text(left + width / 2, row * ROW + 17, text))
    return _svg(len(rows) * ROW + 4, title, shapes)


def tensor_parallel() -> str:
    """Return which columns and rows of a feed-forward block's matrices each of 4 ranks has."""
    return parts("TP 4: matrices of a feed-forward block", _even(4, ["up, outputs", "down, inputs"], 4))


def sequence_parallel() -> str:
    """Return which positions each of 4 ranks has between two blocks."""
    return parts("SP with TP 4: positions of the residual stream", _even(4, ["positions"], 8))


def context_parallel() -> str:
    """Return the chunks of a sequence that each of 4 ranks has."""
    cut = SequenceCut(length=64, size=4)
    rows = {f"rank {rank}": _chosen(cut.chunks_of(rank), [f"chunk {chunk}" for chunk in range(8)]) for rank in range(4)}
    return parts("CP 4: chunks of each sequence", rows)


def expert_parallel() -> str:
    """Return the experts that each of 4 ranks has."""
    return parts("EP 4: experts of each layer", _even(4, ["expert"], 8))


def pipeline_parallel() -> str:
    """Return the layers that each of 4 ranks has."""
    layers = [f"layer {number}" for number in range(10)]
    ends = [0, *(layers.index(cut) + 1 for cut in even_cuts(layers, 4)), len(layers)]
    rows = {f"rank {rank}": _chosen(range(*extent), layers) for rank, extent in enumerate(pairwise(ends))}
    return parts("PP 4: layers of the model", rows)


def zero() -> str:
    """Return what each of 4 replicas has under ZeRO-1."""
    rows = _even(4, ["states"], 4)
    return parts("ZeRO-1 over 4 replicas", {rank: {"weights": "#8ecf9d", **cells} for rank, cells in rows.items()})


def _even(ranks: int, names: Sequence[str], count: int) -> dict[str, Cells]:
    """Return rows in which each rank has an equal share of `count` parts of each name."""
    texts = [(part, f"{name} {part}") for name in names for part in range(count)]
    return {f"rank {rank}": {text: part * ranks // count == rank for part, text in texts} for rank in range(ranks)}


def _chosen(indices: Iterable[int], texts: Sequence[str]) -> Cells:
    return {text: index in set(indices) for index, text in enumerate(texts)}


def _box(left: float, top: float, width: float, color: str, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 6}" fill="{color}" '
        f'fill-opacity="{opacity:.2f}" stroke="#ffffff"/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _svg(height: int, title: str, shapes: Iterable[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 24}" role="img" '
            f'font-family="sans-serif" font-size="11" fill="{INK}">',
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{height + 24}" fill="#ffffff"/>',
            *shapes,
            _text(WIDTH / 2, height + 15, title),
            "</svg>\n",
        ]
    )


DRAWINGS: dict[str, Callable[[], str]] = {
    "schedule-gpipe.svg": lambda: schedule("gpipe"),
    "schedule-1f1b.svg": lambda: schedule("1f1b"),
    "schedule-interleaved.svg": lambda: schedule("interleaved", stages_per_rank=2),
    "schedule-zb-h1.svg": lambda: schedule("zb-h1"),
    "schedule-zb-v.svg": lambda: schedule("zb-v", stages_per_rank=2),
    "parallel-tp.svg": tensor_parallel,
    "parallel-sp.svg": sequence_parallel,
    "parallel-cp.svg": context_parallel,
    "parallel-ep.svg": expert_parallel,
    "parallel-pp.svg": pipeline_parallel,
    "parallel-zero.svg": zero,
}


if __name__ == "__main__":
    for file, svg in drawings().items():
        (PICTURES / file).write_text(svg, encoding="utf8")
