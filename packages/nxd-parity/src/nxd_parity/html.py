"""The report as one HTML page: no scripts, nothing loaded from elsewhere, and all names escaped."""

from collections.abc import Iterator
from html import escape
from itertools import groupby

from nxd_parity import events
from nxd_parity.report import (
    AGREES,
    DIFFERS_FIRST,
    DIFFERS_LATER,
    NOT_COMPARED,
    STATUSES,
    WITHOUT_EFFECT,
    Location,
    Report,
    printable,
    runs,
)
from nxd_parity.summary import (
    Node,
    count,
    facts,
    headline,
    owner_and_state,
    parts_of,
    step_title,
    tree_of,
)

MOST_TREES = 20  # steps with a tree; the first difference is in one of them
TINTS = ("#eaf2fb", "#e9f5ea", "#f6eefb", "#fdf3e4", "#e6f6f6", "#fbeef2", "#f1f1e4", "#ececf6")
HEAT = ("#fff3b0", "#ffe680", "#ffd24d", "#ffb833", "#ff9626", "#f9701e", "#ea4a1f", "#cf222e", "#8b0f1a")
CLASSES = {
    DIFFERS_FIRST: "first",
    DIFFERS_LATER: "later",
    WITHOUT_EFFECT: "harmless",
    NOT_COMPARED: "unknown",
    AGREES: "agrees",
}
STYLE = """
:root { color-scheme: light dark; --line: #8884; --agrees: #1a7f37; --first: #cf222e; --later: #b35900;
  --harmless: #8250df; --unknown: #777; }
@media (prefers-color-scheme: dark) { :root { --agrees: #4ac26b; --first: #ff7b72; --later: #f0a048;
  --harmless: #c297ff; --unknown: #999; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
code, .tree { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
.first { color: var(--first); } .later { color: var(--later); } .agrees { color: var(--agrees); }
.harmless { color: var(--harmless); } .unknown { color: var(--unknown); }
.columns { display: flex; flex-wrap: wrap; gap: 2rem; align-items: flex-start; } .columns > * { flex: 1 1 28rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; }
th { font-weight: 500; white-space: nowrap; } tr + tr { border-top: 1px solid var(--line); }
.counts td, .counts thead th { text-align: right; }
.tree details, .tree .leaf { margin-left: 1.1rem; border-left: 1px solid var(--line); padding-left: .6rem; }
.tree .leaf { padding-left: 1.6rem; } summary { cursor: pointer; }
.chip { border: 1px solid currentColor; border-radius: .6rem; padding: 0 .45rem; margin-left: .35rem; font-size: .8em;
  white-space: nowrap; }
svg { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); } figure { margin: 0; }
figcaption { font-size: .9em; } .swatch { display: inline-block; width: .8em; height: .8em; border: 1px solid #888; }
"""


def to_html(report: Report) -> str:
    """Return a page that shows a report."""
    verdict = '<h1 class="agrees">Equal</h1>' if report.agrees else '<h1 class="first">Different</h1>'
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>nxd-parity: {_text(headline(report))}</title><style>{STYLE}</style></head><body>",
            f"{verdict}<p>{_text(headline(report))}</p>",
            *_first(report),
            *_counts(report),
            *_trees(report),
            *_others(report),
            "</body></html>\n",
        ]
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _first(report: Report) -> Iterator[str]:
    if report.first is None:
        return
    yield '<h2>The first difference</h2><div class="columns"><table>'
    for label, text in facts(report):
        yield f"<tr><th>{label}</th><td>{_text(text)}</td></tr>"
    yield "</table>"
    if report.location is not None:
        yield from _picture(report.location)
    yield "</div>"


def _picture(location: Location) -> Iterator[str]:
    rows, columns = len(location.owners), len(location.owners[0])
    size = max(min(512 // max(rows, columns), 32), 1)
    width, height = columns * size, rows * size
    yield f'<figure><svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}"'
    yield f' viewBox="0 0 {width} {height}"><title>where the tensor differs</title><g shape-rendering="crispEdges">'
    for row, (owners, levels) in enumerate(zip(location.owners, location.differences, strict=True)):
        at = 0
        for (owner, level), cells in groupby(zip(owners, levels, strict=True)):
            length = len(list(cells))
            color = HEAT[level - 1] if level else TINTS[owner % len(TINTS)] if owner >= 0 else "#777"
            box = f'x="{at * size}" y="{row * size}" width="{length * size}" height="{size}"'
            yield f'<rect {box} fill="{color}"/>'
            at += length
    yield f'<path d="{_borders(location, size)}" stroke="#0550ae" stroke-width="2" fill="none"/></g>'
    if location.index:
        place = [location.index[dim] for dim in location.dims]
        row, column = (0, *place) if len(place) == 1 else place
        x, y = ((at // step + 0.5) * size for at, step in zip((column, row), location.cell[::-1], strict=True))
        yield f'<circle cx="{x}" cy="{y}" r="{max(size / 2 - 1, 7)}" stroke="#000" stroke-width="1.5" fill="none"/>'
    yield "</svg><figcaption>"
    yield from _caption(location)
    yield "</figcaption></figure>"


def _borders(location: Location, size: int) -> str:
    """Return the lines between cells that other ranks have."""
    lines = []
    for row, owners in enumerate(location.owners):
        for column, owner in enumerate(owners):
            if column and owners[column - 1] != owner:
                lines.append(f"M{column * size} {row * size}v{size}")
            if row and location.owners[row - 1][column] != owner:
                lines.append(f"M{column * size} {row * size}h{size}")
    return "".join(lines)


def _caption(location: Location) -> Iterator[str]:
    names = [f"dim {dim} ({location.shape[dim]})" for dim in location.dims]
    axes = f"columns are {names[-1]}" if len(names) == 1 else f"rows are {names[0]}, columns {names[1]}"
    fixed = [f"{location.index[dim]} of dim {dim}" for dim in _hidden(location) if location.index]
    at = f", at position {' and '.join(fixed)}" if fixed else ""
    high, wide = location.cell
    cells = f" A cell is {high} x {wide} elements." if (high, wide) != (1, 1) else ""
    yield f"Of {list(location.shape)}, {axes}{at}.{cells} From yellow to dark red: differences, on a logarithmic scale "
    yield "up to the largest; the position above is circled. Blue lines: borders of shards."
    for number, ranks in enumerate(location.holders[: len(TINTS)]):
        of_ranks = "rank" if len(ranks) == 1 else "ranks"
        yield f' <span class="swatch" style="background:{TINTS[number]}"></span> {of_ranks} {runs(ranks)}'
    if any(-1 in row for row in location.owners):
        yield ' <span class="swatch" style="background:#777"></span> no rank'


def _hidden(location: Location) -> list[int]:
    return [dim for dim, size in enumerate(location.shape) if dim not in location.dims and size > 1]


def _counts(report: Report) -> Iterator[str]:
    of_steps = count(report)
    kinds = [kind for kind in events.KINDS if any(kind in it for it in of_steps.values())]
    yield '<h2>Tensors that agree</h2><table class="counts"><thead><tr><th></th>'
    yield "".join(f"<th>{kind}</th>" for kind in kinds) + "</tr></thead>"
    for step, of_kind in of_steps.items():
        cells = []
        for kind in kinds:
            counts = of_kind.get(kind)
            if not counts:
                cells.append("<td></td>")
                continue
            worst, total = next(it for it in STATUSES if counts[it]), counts.total()
            number = str(total) if counts[AGREES] == total else f"{counts[AGREES]} of {total}"
            cells.append(f'<td class="{CLASSES[worst]}">{number}</td>')
        yield f"<tr><th>{step_title(step)}</th>{''.join(cells)}</tr>"
    yield "</table>"


def _trees(report: Report) -> Iterator[str]:
    first, steps = report.first, sorted(report.tensors)
    at = steps.index(first.step) if first is not None and first.step in steps else 0
    begin = max(min(at - MOST_TREES // 2, len(steps) - MOST_TREES), 0)
    shown = steps[begin : begin + MOST_TREES]
    yield '<h2>Modules</h2><p class="legend">'
    yield "".join(f'<span class="chip {CLASSES[it]}">{it}</span>' for it in STATUSES) + "</p>"
    if len(shown) < len(steps):
        yield f"<p>Of {len(steps)} steps, {shown[0]}..{shown[-1]} are shown.</p>"
    for step in shown:
        opened: set[tuple[str, ...]] = set()
        if first is not None and step == first.step:
            paths = (parts_of(first.name), parts_of(owner_and_state(first.kind, first.shown_in)[0]))
            opened = {tuple(path[:depth]) for path in paths for depth in range(len(path) + 1)}
        yield '<div class="tree">'
        yield from _node(tree_of(report.tensors[step]), f"{step_title(step)}, the whole model", (), opened)
        yield "</div>"


def _node(node: Node, name: str, path: tuple[str, ...], opened: set[tuple[str, ...]]) -> Iterator[str]:
    line = f'<span class="{CLASSES[node.status]}">{_text(name)}</span>'
    for status, kinds in node.by_status().items():
        line += "".join(
            f'<span class="chip {CLASSES[status]}" title="{_text(f"{kind}: {status}")}">{_text(kind)}</span>'
            for kind in kinds
        )
    if not node.children:
        yield f'<div class="leaf">{line}</div>'
        return
    yield f"<details{' open' if path in opened else ''}><summary>{line}</summary>"
    for child in node.children.values():
        yield from _node(child, child.name, (*path, child.name), opened)
    yield "</details>"


def _others(report: Report) -> Iterator[str]:
    """Yield what is listed: later differences, what was not compared, notes."""
    lists = {
        "Differences after it": [str(it) for it in report.findings[1:]],
        "Not compared": [f"{name}: {reason}" for name, reason in report.not_compared.items()],
        "Notes": report.notes,
    }
    for title, lines in lists.items():
        if lines:
            items = "".join(f"<li><code>{_text(it)}</code></li>" for it in lines)
            yield f"<h2>{title}</h2><details><summary>show {len(lines)}</summary><ol>{items}</ol></details>"
