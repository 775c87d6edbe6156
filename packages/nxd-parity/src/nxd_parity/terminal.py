"""The report on one screen of a terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from nxd_parity import events
from nxd_parity.report import AGREES, DIFFERS_FIRST, DIFFERS_LATER, NOT_COMPARED, WITHOUT_EFFECT, Report, printable
from nxd_parity.summary import Node, count, facts, headline, owner_and_state, parts_of, step_title, tree_of

COLORS = {
    DIFFERS_FIRST: "bold red",
    DIFFERS_LATER: "yellow",
    WITHOUT_EFFECT: "magenta",
    NOT_COMPARED: "bright_black",
    AGREES: "green",
}
FEWEST_LINES = 6  # of the tree
MOST_NOTES = 3
MOST_BESIDE = 12  # modules before and after the one that differs
FEWEST_INSIDE = 2  # if there is no room for that many beside it, what is in it is left out


def show(report: Report, console: Console | None = None) -> None:
    """Print a report, cut to the height of the terminal."""
    console = console or Console()
    parts = list(_parts(report))
    if report.first is not None:
        left = console.height - 1 - sum(_height(it, console) for it in parts)
        parts.insert(2, _tree(report, max(left, FEWEST_LINES), console))
    console.print(Group(*parts))


def _height(part: RenderableType, console: Console) -> int:
    return len(console.render_lines(part, pad=False))


def _parts(report: Report) -> Iterator[RenderableType]:
    if report.first is None:
        verdict, color = "EQUAL", "green"
    else:
        verdict, color = "DIFFERENT", "red"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts(report):
        table.add_row(label, Text(text, style="bold red" if label in ("where", "fault") else ""))
    lines: list[RenderableType] = [Text(headline(report)), *([table] if table.row_count else [])]
    yield Panel(Group(*lines), title=Text(verdict, style=f"bold {color}"), title_align="left", border_style=color)
    yield _counts(report)
    notes = [*report.notes]
    if report.not_compared:
        name, reason = next(iter(report.not_compared.items()))
        notes.append(f"{len(report.not_compared)} tensors were not compared, such as {name}: {reason}")
    for note in notes[:MOST_NOTES]:
        yield Text(printable(note), style="bright_black", no_wrap=True, overflow="ellipsis")


def _counts(report: Report) -> RenderableType:
    """Return a table of the numbers of tensors that agree: the steps around the first difference, and all others."""
    of_steps = count(report)
    around = {} if report.first is None else {it: step_title(it) for it in _around(report.first.step, list(of_steps))}
    rows: dict[str, dict[str, Counter[str]]] = {}
    rest = "all steps" if not around else "others"
    for step, of_kind in of_steps.items():
        row = rows.setdefault(around.get(step, rest), {})
        for kind, counts in of_kind.items():
            row[kind] = row.get(kind, Counter()) + counts
    kinds = [it for it in events.KINDS if any(it in row for row in rows.values())]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bright_black", pad_edge=False)
    table.add_column("agree", style="bright_black", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, justify="right")
    for title, row in sorted(rows.items(), key=lambda it: it[0] == rest):
        table.add_row(title, *[_cell(row.get(kind)) for kind in kinds])
    return table


def _around(step: int, steps: Sequence[int]) -> Sequence[int]:
    at = steps.index(step) if step in steps else 0
    return steps[max(at - 1, 0) : at + 2]


def _cell(counts: Counter[str] | None) -> Text:
    if counts is None:
        return Text("")
    total, worst = counts.total(), next(it for it in COLORS if counts[it])
    return Text(str(total) if counts[AGREES] == total else f"{counts[AGREES]}/{total}", style=COLORS[worst])


def _tree(report: Report, lines: int, console: Console) -> RenderableType:
    """Return the tree of modules, opened at the first difference, with as many others beside it as fit."""
    first = report.first
    assert first is not None
    root = tree_of(report.tensors.get(first.step, {}))
    paths = [parts_of(first.name), parts_of(owner_and_state(first.kind, first.shown_in)[0])]
    opened = {tuple(path[:depth]) for path in paths for depth in range(len(path) + 1)}
    tree = Tree("")
    for beside in range(MOST_BESIDE, -1, -1):
        tree = Tree(_line(root, f"step {first.step}, the whole model", is_opened=True), guide_style="bright_black")
        _add_children(tree, root, (), opened, beside)
        if _height(tree, console) <= lines:
            break
    return tree


def _add_children(tree: Tree, node: Node, path: tuple[str, ...], opened: set[tuple[str, ...]], beside: int) -> None:
    children = list(node.children.values())
    places = [at for at, it in enumerate(children) if (*path, it.name) in opened]
    if not places and beside < FEWEST_INSIDE:
        return
    places = places or [0]
    left_out: list[Node] = []
    for at, child in enumerate(children):
        if min(abs(at - it) for it in places) > beside:
            left_out.append(child)
            continue
        _add_left_out(tree, left_out)
        left_out = []
        inner = (*path, child.name)
        branch = tree.add(_line(child, printable(child.name), is_opened=inner in opened))
        if inner in opened:
            _add_children(branch, child, inner, opened, beside)
    _add_left_out(tree, left_out)


def _add_left_out(tree: Tree, nodes: Sequence[Node]) -> None:
    if len(nodes) <= 1:
        for node in nodes:
            tree.add(_line(node, printable(node.name), is_opened=False))
        return
    counts = Counter((it.status, _since(it)) for it in nodes)
    text = Text(f"... {len(nodes)} more: ", style="bright_black", no_wrap=True, overflow="ellipsis")
    for number, ((status, since), several) in enumerate(counts.items()):
        words = status if several == 1 else status.replace("differs", "differ").replace("agrees", "agree")
        text.append(f"{', ' if number else ''}{several} {words}{since}", style=COLORS[status])
    tree.add(text)


def _since(node: Node) -> str:
    """Return since when a module differs, in the order of a step."""
    kind = node.first_kind(node.status) if node.status in (DIFFERS_FIRST, DIFFERS_LATER) else ""
    return f" from {kind} on" if kind else ""


def _line(node: Node, name: str, *, is_opened: bool) -> Text:
    """Return a line of the tree: an opened module's own tensors, or the worst of all that is in a closed one."""
    status = node.status
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(name, style=COLORS[status])
    if not is_opened:
        return text.append(f"  {status}{_since(node)}", style=COLORS[status])
    for number, (of_own, kinds) in enumerate(node.by_status().items()):
        text.append("; " if number else "  ", style="bright_black")
        text.append(of_own, style=COLORS[of_own])
        text.append(f": {printable(', '.join(kinds))}", style="bright_black")
    return text
