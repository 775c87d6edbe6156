"""Drawings of the explanation pages, made from the objects that they explain.

    python tools/site/drawings.py    # writes docs/pictures, where a test compares them

Each function returns SVG text. Text and lines have the color of the card's theme, so both light and dark are readable.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from nxd_layers.context import SequenceCut
from nxd_pipeline import Costs, StageCost, make_schedule, simulate
from nxd_pipeline.partition.cuts import even_cuts
from nxd_pipeline.schedules.simulation import COLORS
from nxd_state import Mesh, ShardSpec, fuse_along, shard_along

PICTURES = Path(__file__).parents[2] / "docs/pictures"
ROW, LABEL, WIDTH = 26, 64, 800  # pixels: height of a rank's row, width of its label and of the whole drawing
KEPT = "#4c78a8"
Cells = Mapping[str, bool | str]  # by the text in the cell: whether the rank has it, or its color
HUES = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
STYLE = """<style>
svg { color: #1f2328; font: 13px system-ui, sans-serif } .card { fill: #ffffff }
text { fill: currentColor } .line { fill: none; stroke: currentColor } .mid { text-anchor: middle }
@media (prefers-color-scheme: dark) { svg { color: #e6e6e6 } .card { fill: #1e2129 } }
</style>"""


def drawings() -> dict[str, str]:
    """Return all drawings by file name."""
    fused = [
        fuse_along([shard_along((rows, 6), 0, rank=rank, size=2, name=name) for name, rows in QKV.items()], dim=0)
        for rank in range(2)
    ]
    padded = [shard_along((10, 6), 0, rank=rank, size=4, padded_length=12, name="embed.weight") for rank in range(4)]
    return {
        "mesh.svg": mesh(Mesh(world_size=16, pp=2, dp=2, tp=4), rank=5),
        "shards-fused.svg": shards(fused),
        "shards-padded.svg": shards(padded),
        "layouts.svg": layouts({"dp=4": Mesh(4), "dp=2, tp=2": Mesh(4, tp=2), "pp=2, tp=2": Mesh(4, pp=2, tp=2)}),
        "checkpoint-commit.svg": checkpoint_commit(),
        "shared-memory.svg": shared_memory(num_ranks=3),
        "schedule-gpipe.svg": schedule("gpipe"),
        "schedule-1f1b.svg": schedule("1f1b"),
        "schedule-interleaved.svg": schedule("interleaved", stages_per_rank=2),
        "schedule-zb-h1.svg": schedule("zb-h1"),
        "schedule-zb-v.svg": schedule("zb-v", stages_per_rank=2),
        "parallel-tp.svg": tensor_parallel(),
        "parallel-sp.svg": sequence_parallel(),
        "parallel-cp.svg": context_parallel(),
        "parallel-ep.svg": expert_parallel(),
        "parallel-pp.svg": pipeline_parallel(),
        "parallel-zero.svg": zero(),
    }


QKV = {"q_proj.weight": 8, "k_proj.weight": 4, "v_proj.weight": 4}


def mesh(mesh: Mesh, rank: int) -> str:
    """Draw the ranks of a mesh of stages, replicas and tensor-parallel ranks, with the groups that one rank is in."""
    cell, parts = 64, []
    panel = mesh.tp * cell + 60
    groups = {axis: mesh.group_of(rank, axis) for axis in ("tp", "dp", "pp")}
    for stage in range(mesh.pp):
        left = 70 + stage * panel
        parts.append(text(left + mesh.tp * cell / 2, 24, f"stage {stage}", "mid"))
        parts += [text(left + (tp + 0.5) * cell, 46, f"tp {tp}", "mid") for tp in range(mesh.tp)]
        for dp in range(mesh.dp):
            top = 56 + dp * cell
            if stage == 0:
                parts.append(text(16, top + cell / 2 + 4, f"dp {dp}"))
            for tp in range(mesh.tp):
                number = mesh.rank_at(pp=stage, dp=dp, tp=tp)
                x = left + tp * cell
                parts.append(rect(x, top, cell - 6, cell - 6))
                colors = [hue for hue, group in zip(HUES, groups.values(), strict=False) if number in group]
                parts += [fill(x + 4 + 17 * i, top + 38, 14, 14, hue) for i, hue in enumerate(colors)]
                parts.append(text(x + cell / 2 - 3, top + 24, str(number), "mid"))
    bottom = 56 + mesh.dp * cell + 20
    for index, (axis, ranks) in enumerate(groups.items()):
        y = bottom + 22 * index
        parts += [fill(70, y - 11, 14, 14, HUES[index]), text(92, y, f"{axis} group of rank {rank}: {list(ranks)}")]
    return svg(70 + mesh.pp * panel, bottom + 22 * len(groups), parts)


def shards(specs: Sequence[ShardSpec]) -> str:
    """Draw whole tensors on the left, and the boxes of them that each rank's parameter holds on the right."""
    row, width, parts = 18, 120, [text(16, 24, "whole tensors")]
    shapes = {name: shape for spec in specs for name, shape in spec.logical_shapes.items()}
    tops, y = {}, 40
    for name, shape in shapes.items():
        tops[name] = y
        parts += [rect(16, y, width, shape[0] * row), text(16 + width + 8, y + 14, f"{name} {list(shape)}")]
        y += shape[0] * row + 14
    height = y
    for rank, spec in enumerate(specs):
        left = 16 + width + 200 + rank * (width + 20)
        parts += [text(left, 24, f"rank {rank}: {list(spec.local_shape)}")]
        parts.append(rect(left, 40, width, spec.local_shape[0] * row))
        held = 0
        for piece in spec.pieces:
            begin, rows = piece.logical.offset[0], piece.logical.shape[0]
            hue = HUES[rank]
            parts.append(fill(16, tops[piece.name] + begin * row, width, rows * row, hue))
            parts.append(text(24, tops[piece.name] + begin * row + 14, f"rank {rank}"))
            top = 40 + piece.local.offset[0] * row
            parts.append(fill(left, top, width, rows * row, hue))
            short = piece.name.removesuffix(".weight")
            parts.append(text(left + 8, top + 14, f"{short} {begin}:{begin + rows}"))
            held = max(held, piece.local.offset[0] + rows)
        if spec.has_padding:
            parts.append(text(left + 8, 40 + held * row + 14, "padding"))
        height = max(height, 54 + spec.local_shape[0] * row)
    return svg(16 + width + 200 + len(specs) * (width + 20), height, parts)


def layouts(meshes: dict[str, Mesh]) -> str:
    """Draw what each of four ranks computes of a batch of 8 rows and layers of 4 column blocks, at several layouts."""
    cell, parts = 20, []
    for index, (name, mesh) in enumerate(meshes.items()):
        top = 44 + index * 150
        parts.append(text(16, top, name))
        for rank in range(mesh.world_size):
            at = mesh.coordinates(rank)
            left = 16 + rank * 150
            rows, columns = 4 // mesh.dp, 4 // mesh.tp
            parts.append(text(left, top + 24, f"rank {rank}" + (f", stage {at['pp']}" if mesh.pp > 1 else "")))
            parts.append(rect(left, top + 32, 4 * cell, 4 * cell))
            x, y = left + at["tp"] * columns * cell, top + 32 + at["dp"] * rows * cell
            parts.append(fill(x, y, columns * cell, rows * cell, HUES[at["pp"]]))
    return svg(
        16 + 4 * 150, 30 + 150 * len(meshes), [*parts, text(16, 20, "down: the batch; across: a layer's columns")]
    )


COMMIT = (  # what happens, who does it, and which checkpoint a power cut after it leaves
    ("write data files into .staging/, fsync each", "every rank", "old"),
    ("hear from every rank that it is done", "all ranks", "old"),
    ("check sizes, write and fsync manifest.json", "rank 0", "old"),
    ("rename .staging/<id> to the tag: the commit", "rank 0", "old or new"),
    ("fsync the root; all ranks return", "rank 0", "new"),
)
FOUND = {"old": HUES[0], "old or new": HUES[5], "new": HUES[1]}


def checkpoint_commit() -> str:
    """Draw the steps of a save, and what is found after a crash in each."""
    parts = [text(16, 24, "step"), text(400, 24, "by"), text(490, 24, "a power cut after it leaves")]
    for index, (step, who, found) in enumerate(COMMIT):
        top = 38 + index * 44
        parts += [rect(16, top, 360, 34), text(28, top + 22, f"{index + 1}. {step}"), text(400, top + 22, who)]
        parts += [fill(490, top, 140, 34, FOUND[found]), text(560, top + 22, found, "mid")]
    return svg(650, 38 + 44 * len(COMMIT) + 6, parts)


def shared_memory(num_ranks: int) -> str:
    """Draw an all-reduce of a small tensor through the segments that ranks share."""
    parts = [
        text(16, 24, "1. each rank posts its part in its own segment"),
        text(16, 160, "2. each rank adds all parts"),
    ]
    for rank in range(num_ranks):
        left = 16 + rank * 180
        parts += [rect(left, 38, 160, 84), text(left + 10, 58, f"segment of rank {rank}")]
        parts += [fill(left + 10, 68, 60, 40, HUES[rank]), text(left + 40, 92, f"x{rank}", "mid")]
        parts += [rect(left + 80, 68, 70, 40), text(left + 115, 92, "posted 1", "mid")]
        parts += [rect(left, 174, 160, 64), text(left + 10, 194, f"rank {rank}")]
        for other in range(num_ranks):
            x = left + 10 + other * 46
            parts += [fill(x, 204, 28, 24, HUES[other]), text(x + 14, 221, f"x{other}", "mid")]
            if other:
                parts.append(text(x - 9, 221, "+", "mid"))
    parts.append(text(16, 262, "in rank order, so the result has the same bits everywhere and in every run"))
    return svg(16 + num_ranks * 180, 276, parts)


def schedule(name: str, *, stages_per_rank: int = 1) -> str:
    """Draw a schedule's computations on 4 ranks with 8 microbatches; later stages of a rank are paler."""
    share = 1 / stages_per_rank
    costs = Costs(StageCost(forward=share, backward_input=share, backward_weight=share))
    timeline = simulate(make_schedule(name, pipeline_size=4, num_microbatches=8), costs)
    scale = (WIDTH - LABEL - 8) / timeline.makespan
    parts = []
    for rank, spans in enumerate(timeline.compute_spans):
        parts.append(text(8, rank * ROW + 21, f"rank {rank}"))
        stages = sorted({span.action.stage for span in spans})
        for span in spans:
            left, right = (LABEL + (time - timeline.start) * scale for time in (span.start, span.end))
            opacity = 0.6 - 0.4 * stages.index(span.action.stage) / len(stages)
            parts.append(fill(left, rank * ROW + 6, right - left, ROW - 6, COLORS[span.action.kind], opacity))
            parts.append(text((left + right) / 2, rank * ROW + 21, str(span.action.microbatch), "mid"))
    return titled(
        f"{timeline.name}: {timeline.bubble_fraction:.0%} of the time idle", len(timeline.compute_spans), parts
    )


def tensor_parallel() -> str:
    """Draw which columns and rows of a feed-forward block's matrices each of 4 ranks has."""
    return cells("TP 4: outputs of up, inputs of down, in a feed-forward block", even(4, ["up", "down"], 4))


def sequence_parallel() -> str:
    """Draw which positions each of 4 ranks has between two blocks."""
    return cells("SP with TP 4: positions of the residual stream", even(4, ["positions"], 8))


def context_parallel() -> str:
    """Draw the chunks of a sequence that each of 4 ranks has."""
    cut = SequenceCut(length=64, size=4)
    rows = {f"rank {rank}": chosen(cut.chunks_of(rank), [f"chunk {chunk}" for chunk in range(8)]) for rank in range(4)}
    return cells("CP 4: chunks of each sequence", rows)


def expert_parallel() -> str:
    """Draw the experts that each of 4 ranks has."""
    return cells("EP 4: experts of each layer", even(4, ["expert"], 8))


def pipeline_parallel() -> str:
    """Draw the layers that each of 4 ranks has."""
    layers = [f"layer {number}" for number in range(10)]
    ends = [0, *(layers.index(cut) + 1 for cut in even_cuts(layers, 4)), len(layers)]
    rows = {f"rank {rank}": chosen(range(*extent), layers) for rank, extent in enumerate(pairwise(ends))}
    return cells("PP 4: layers of the model", rows)


def zero() -> str:
    """Draw what each of 4 replicas has under ZeRO-1."""
    rows = even(4, ["states"], 4)
    return cells("ZeRO-1 over 4 replicas", {rank: {"weights": HUES[2], **states} for rank, states in rows.items()})


def cells(title: str, rows: Mapping[str, Cells]) -> str:
    """Return a picture with a row of cells for each rank; those that the rank has are colored."""
    parts = []
    for row, (label, kept_of) in enumerate(rows.items()):
        parts.append(text(8, row * ROW + 21, label))
        width = (WIDTH - LABEL - 8) / len(kept_of)
        for column, (part, kept) in enumerate(kept_of.items()):
            left = LABEL + column * width
            parts.append(rect(left, row * ROW + 6, width, ROW - 6, faint=True))
            if kept:
                parts.append(fill(left, row * ROW + 6, width, ROW - 6, kept if isinstance(kept, str) else KEPT))
                parts.append(text(left + width / 2, row * ROW + 21, part, "mid"))
    return titled(title, len(rows), parts)


def even(ranks: int, names: Sequence[str], count: int) -> dict[str, Cells]:
    """Return rows in which each rank has an equal share of `count` parts of each name."""
    texts = [(part, f"{name} {part}") for name in names for part in range(count)]
    return {f"rank {rank}": {label: part * ranks // count == rank for part, label in texts} for rank in range(ranks)}


def chosen(indices: Iterable[int], texts: Sequence[str]) -> Cells:
    """Return a row in which the rank has the texts at these indices."""
    kept = set(indices)
    return {label: index in kept for index, label in enumerate(texts)}


def titled(title: str, num_rows: int, parts: Sequence[str]) -> str:
    """Return a picture of rows with a title below them."""
    return svg(WIDTH, num_rows * ROW + 36, [*parts, text(WIDTH / 2, num_rows * ROW + 26, title, "mid")])


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """Return a picture with a card behind its parts."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    card = f'<rect class="card" width="{width:g}" height="{height:g}" rx="8"/>'
    return "\n".join([head, STYLE, card, *parts, "</svg>", ""])


def rect(x: float, y: float, width: float, height: float, *, faint: bool = False) -> str:
    """Return an outlined box."""
    opacity = ' opacity="0.2"' if faint else ""
    return f'<rect class="line" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"{opacity}/>'


def fill(x: float, y: float, width: float, height: float, hue: str, opacity: float = 0.35) -> str:
    """Return a colored box through which text stays readable."""
    box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {box} rx="3" fill="{hue}" fill-opacity="{opacity:g}" stroke="{hue}"/>'


def text(x: float, y: float, words: str, place: str = "") -> str:
    """Return a line of text."""
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}"{f" class={place!r}" if place else ""}>{escaped}</text>'


if __name__ == "__main__":
    for name, picture in drawings().items():
        (PICTURES / name).write_text(picture, encoding="utf8")
