"""A report of graphs as tables on a terminal. rich is imported only here."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nxd_trainer.doctor.graph.analysis import GraphReport

NUM_CASTS = 10
_WIDTH_OF_A_FILE = 160  # where there is no terminal: lines are not broken more than need be
_NOTES = (
    "Bytes sent are those of ring algorithms, by the rank that sends most. FLOPs are of matrix products and "
    "convolutions. The peak is an upper bound: results that the compiler fuses away are counted, those of broadcasts "
    "and constants are not, and updated weights are written over the old ones."
)


def render_report(report: GraphReport, console: Console | None = None) -> None:
    """Print the tables, what the graphs show, and what the numbers mean.

    Args:
        console: where to; standard output if None.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_FILE, no_color=True)
    console.print(Group(*_parts(report)))


def _parts(report: GraphReport) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(report.title, style="bold"), _graphs(report)]
    parts += [Text(f"graph {row.number} is new: {row.why}") for row in report.graphs if row.why]
    parts.append(_collectives(report) if report.collectives else Text(f"graph {report.main} has no collectives"))
    parts.append(_memory(report))
    if report.casts:
        parts.append(_casts(report))
    if report.loops_counted_once:
        parts.append(Text(f"counted as if they ran once: {', '.join(report.loops_counted_once)}"))
    parts.append(Text(_NOTES, style="dim"))
    findings = "; ".join(filter(None, [report.verdict, report.ranks]))
    if findings:
        parts.append(Text(findings, style="bold green" if report.is_right else "bold red"))
    return parts


def _table(title: str, *columns: str) -> Table:
    """Columns whose name begins with a blank hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        is_number = column.startswith(" ")
        table.add_column(column.strip(), justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _graphs(report: GraphReport) -> Table:
    when = "in steps" if report.graphs_per_step else "runs"
    table = _table("graphs", " graph", when, " instructions", " FLOPs", " peak bytes", "asked for by")
    for row in report.graphs:
        used = _ranges(row.steps) if report.graphs_per_step else str(len(row.steps))
        numbers = [str(row.number), used, f"{row.instructions:,}", f"{row.flops:,}", f"{row.peak_bytes:,}"]
        table.add_row(*numbers, row.asked_by or "the end of the step")
    return table


def _collectives(report: GraphReport) -> Table:
    columns = ("collective", "type", " in a step", "groups", " bytes sent", "largest")
    table = _table(f"collectives of graph {report.main}", *columns)
    for row in report.collectives:
        groups = " ".join(str(list(group)) for group in row.groups[:4])
        more = f" and {len(row.groups) - 4} more" if len(row.groups) > 4 else ""
        table.add_row(row.kind, row.dtype, str(row.count), groups + more, f"{row.bytes_sent:,}", row.largest)
    return table


def _memory(report: GraphReport) -> Table:
    memory = report.memory
    table = _table(f"memory of graph {report.main}, at its peak in {memory.peak_at}", "what", "shape", " bytes")
    table.add_row("arguments: weights, optimizer states, data", "", f"{memory.arguments:,}")
    for buffer in memory.largest:
        table.add_row(buffer.place, buffer.shape, f"{buffer.num_bytes:,}")
    others = memory.temporaries - sum(buffer.num_bytes for buffer in memory.largest)
    table.add_row("others", "", f"{others:,}")
    table.add_row("peak", "", f"{memory.peak:,}")
    return table


def _casts(report: GraphReport) -> Table:
    table = _table(f"casts of graph {report.main}", "from", "to", " in a step", " bytes written", "where")
    for cast in report.casts[:NUM_CASTS]:
        table.add_row(cast.source, cast.target, str(cast.count), f"{cast.num_bytes:,}", cast.place)
    rest = report.casts[NUM_CASTS:]
    if rest:
        count, num_bytes = sum(cast.count for cast in rest), sum(cast.num_bytes for cast in rest)
        table.add_row("others", "", str(count), f"{num_bytes:,}", "")
    return table


def _ranges(steps: tuple[int, ...]) -> str:
    """(1, 2, 3, 5) as "1-3, 5"."""
    parts: list[list[int]] = []
    for step in dict.fromkeys(steps):
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
