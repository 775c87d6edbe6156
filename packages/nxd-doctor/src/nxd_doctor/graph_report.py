"""Reports recorded graphs: which ones run, how often and why, and what the step's graph computes and sends.

nxd_doctor.graphs does the counting; `render_report` shows it as tables on a terminal.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nxd_state import Mesh, ParallelDegrees
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nxd_doctor.graphs import (
    CapturedGraph,
    Cast,
    Memory,
    count_flops,
    find_casts,
    find_collectives,
    first_difference,
    loops_counted_once,
    peak_memory,
)
from nxd_doctor.recording import RecordedRank

_METADATA = re.compile(r", metadata=\{[^}]*\}")


@dataclass(frozen=True)
class GraphRow:
    """One distinct graph.

    Attributes:
        number: number of the graph, from 1, in the order of first runs.
        steps: the steps in which it runs, from 1; a step is repeated for every run in it. For a script: the positions
            of its runs.
        asked_by: "function (file:line)" of the user's code that needed its results; empty if nothing was run.
        instructions: number of instructions in its main computation.
        flops: FLOPs of its matrix products and convolutions.
        peak_bytes: peak of live bytes.
        why: difference from the previous graph of the same line; empty for the first.
    """

    number: int
    steps: tuple[int, ...]
    asked_by: str
    instructions: int
    flops: int
    peak_bytes: int
    why: str


@dataclass(frozen=True)
class CollectiveRow:
    """The collectives of one kind and dtype over the same groups.

    Attributes:
        groups: groups of ranks that exchange; for a permute, pairs (from, to).
        count: number of runs per step.
        bytes_sent: bytes sent per rank and step, with ring algorithms.
        largest: shapes and place of the collective that sends most.
        axis: mesh axes of the groups, such as "tp" or "dp+cp"; empty if they are none, or the layout is unknown.
    """

    kind: str
    dtype: str
    groups: tuple[tuple[int, ...], ...]
    count: int
    bytes_sent: int
    largest: str
    axis: str = ""


@dataclass(frozen=True)
class GraphReport:
    """The whole report.

    Attributes:
        title: name of the recording.
        graphs: every distinct graph of the first rank.
        graphs_per_step: number of graphs in each step of the first rank; empty for a script.
        main: number of the graph that the rest describes: the one with the most arithmetic in the last step.
        new_after: the step after which no graph was new; 0 for a script.
        ranks: result of comparing the ranks; empty if there was only one.
        ranks_differ: whether the ranks' graphs differ.
        zero: what the sharing of states sends between replicas; empty without ZeRO.
        loops_counted_once: loops of the main graph with unknown trip counts.
    """

    title: str
    graphs: list[GraphRow]
    graphs_per_step: list[int]
    main: int
    new_after: int
    collectives: list[CollectiveRow]
    memory: Memory
    casts: list[Cast]
    loops_counted_once: tuple[str, ...]
    ranks: str
    ranks_differ: bool
    zero: str = ""

    @property
    def verdict(self) -> str:
        """One sentence about the number of graphs; empty for a script, whose steps are unknown."""
        if not self.graphs_per_step:
            return ""
        per_step = self.graphs_per_step[-1]
        graphs = "one graph" if per_step == 1 else f"{per_step} graphs"
        news = f"no new graphs after step {self.new_after}" if self.is_settled else "the last step's graph is new"
        return f"{graphs} per step; {news}"

    @property
    def is_settled(self) -> bool:
        """Whether the last step ran only graphs that an earlier step had run."""
        return self.new_after < len(self.graphs_per_step)

    @property
    def is_right(self) -> bool:
        """Whether there is one graph per step, compiled once, and the same on all recorded ranks."""
        steps_are_right = not self.graphs_per_step or (self.graphs_per_step[-1] == 1 and self.is_settled)
        return steps_are_right and not self.ranks_differ


def analyse(
    title: str, recorded: Sequence[RecordedRank], *, world_size: int, degrees: ParallelDegrees | None = None
) -> GraphReport:
    """Analyze the recorded graphs: describe the first rank's, and compare the other ranks' with them."""
    first = recorded[0]
    distinct, numbers = _number(first.steps)
    flops = [count_flops(graph.module) for graph in distinct]
    seen = [number for step in (numbers[-1:] if first.has_steps else numbers) for number in step]
    main = max(seen, key=lambda number: (flops[number] * seen.count(number), number))
    module = distinct[main].module
    comparison, differ = _compare_ranks(recorded)
    collectives = _collective_rows(distinct[main], world_size, degrees.mesh(world_size) if degrees else None)
    return GraphReport(
        title=title,
        graphs=_rows(distinct, numbers, flops),
        graphs_per_step=[len(step) for step in numbers] if first.has_steps else [],
        main=main + 1,
        new_after=_last_new_step(numbers) if first.has_steps else 0,
        collectives=collectives,
        memory=peak_memory(module, updates_in_place=True),
        casts=find_casts(module),
        loops_counted_once=loops_counted_once(module),
        ranks=comparison,
        ranks_differ=differ,
        zero=_bytes_of_zero(collectives, degrees) if degrees else "",
    )


def _number(steps: Sequence[Sequence[CapturedGraph]]) -> tuple[list[CapturedGraph], list[list[int]]]:
    """The distinct graphs, and each step's graphs as indices into them."""
    by_text: dict[str, int] = {}
    distinct: list[CapturedGraph] = []
    numbers: list[list[int]] = []
    for graphs in steps:
        numbers.append([])
        for graph in graphs:
            text = _METADATA.sub("", graph.text)
            if text not in by_text:
                by_text[text] = len(distinct)
                distinct.append(graph)
            numbers[-1].append(by_text[text])
    if not distinct:
        raise ValueError("no graph was recorded; does the step put anything on the XLA device?")
    return distinct, numbers


def _rows(distinct: list[CapturedGraph], numbers: list[list[int]], flops: list[int]) -> list[GraphRow]:
    rows = []
    for index, graph in enumerate(distinct):
        before = next((other for other in reversed(distinct[:index]) if other.asked_by == graph.asked_by), None)
        names = ("the one before", "this one")
        difference = before and first_difference(before.module, graph.module, names=names)
        rows.append(
            GraphRow(
                number=index + 1,
                steps=tuple(step for step, used in enumerate(numbers, start=1) for number in used if number == index),
                asked_by=graph.asked_by,
                instructions=len(graph.module.main.instructions),
                flops=flops[index],
                peak_bytes=peak_memory(graph.module, updates_in_place=True).peak,
                why=str(difference or ""),
            )
        )
    return rows


def _last_new_step(numbers: list[list[int]]) -> int:
    known: set[int] = set()
    last = 0
    for step, used in enumerate(numbers, start=1):
        if set(used) - known:
            last = step
        known |= set(used)
    return last


_AXES = [("tp",), ("cp",), ("dp",), ("ep",), ("etp",), ("dp_exp",), ("dp", "cp"), ("pp", "tp"), ("dp", "cp", "tp")]


def _collective_rows(graph: CapturedGraph, world_size: int, mesh: Mesh | None) -> list[CollectiveRow]:
    axes: dict[frozenset[frozenset[int]], str] = {}
    if mesh is not None:
        for names in _AXES:
            axes.setdefault(_as_sets(mesh.groups(*names)), "+".join(names))
    groups: dict[tuple[str, str, tuple[tuple[int, ...], ...]], CollectiveRow] = {}
    largest: dict[tuple[str, str, tuple[tuple[int, ...], ...]], int] = {}
    for collective in find_collectives(graph.module, world_size=world_size):
        key = collective.kind, collective.dtype, collective.groups
        before = groups.get(key, CollectiveRow(*key, 0, 0, ""))
        told = before.largest
        if collective.bytes_sent >= largest.get(key, 0):
            largest[key] = collective.bytes_sent
            told = f"{', '.join(collective.shapes[:3])} of {collective.place}"
        groups[key] = CollectiveRow(
            *key, before.count + collective.runs, before.bytes_sent + collective.step_bytes, told
        )
    rows = [replace(row, axis=axes.get(_as_sets(row.groups), "")) for row in groups.values()]
    return sorted(rows, key=lambda row: -row.bytes_sent)


def _as_sets(groups: Sequence[Sequence[int]]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, groups))


def _bytes_of_zero(collectives: Sequence[CollectiveRow], degrees: ParallelDegrees) -> str:
    """Return a line with the bytes of gradients and parameters between the replicas that share states."""
    if not degrees.zero_stage:
        return ""

    def sent(kind: str) -> str:
        axes = ("dp", "dp+cp", "dp_exp")
        return f"{sum(row.bytes_sent for row in collectives if row.kind == kind and row.axis in axes):,}"

    return (
        f"ZeRO-{degrees.zero_stage} sends {sent('reduce-scatter')} bytes of gradients (reduce-scatter) and "
        f"{sent('all-gather')} of parameters (all-gather) between replicas"
    )


def _compare_ranks(recorded: Sequence[RecordedRank]) -> tuple[str, bool]:
    """The result of the comparison as text, and whether there is a difference."""
    if len(recorded) < 2:
        return "", False
    first = recorded[0]
    for other in recorded[1:]:
        names = (f"rank {first.rank}", f"rank {other.rank}")
        for step, (ours, theirs) in enumerate(zip(first.steps, other.steps, strict=True), start=1):
            if len(ours) != len(theirs):
                counts = f"{len(ours)} graphs on {names[0]} and {len(theirs)} on {names[1]}"
                return f"{counts} in step {step}", True
            for mine, their in zip(ours, theirs, strict=True):
                difference = first_difference(mine.module, their.module, names=names)
                if difference is not None:
                    return f"in step {step}: {difference}", True
    ranks = " and ".join(str(item.rank) for item in recorded)
    return f"ranks {ranks} build the same graphs", False


NUM_CASTS = 10
_WIDTH_OF_A_FILE = 160  # when not on a terminal, so that few lines wrap
_NOTES = (
    "Bytes sent assume ring algorithms and count the rank that sends most. FLOPs are those of matrix products and "
    "convolutions. The peak is an upper bound: it counts results that the compiler fuses away, but not broadcasts "
    "and constants, and assumes that updated weights overwrite the old ones."
)


def render_report(report: GraphReport, console: Console | None = None) -> None:
    """Print the tables, the findings, and what the numbers mean."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_FILE, no_color=True)
    console.print(Group(*_parts(report)))


def _parts(report: GraphReport) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(report.title, style="bold"), _graphs(report)]
    parts += [Text(f"graph {row.number} is new: {row.why}") for row in report.graphs if row.why]
    parts.append(_collectives(report) if report.collectives else Text(f"graph {report.main} has no collectives"))
    if report.zero:
        parts.append(Text(report.zero))
    parts.append(_memory(report))
    if report.casts:
        parts.append(_casts(report))
    if report.loops_counted_once:
        parts.append(Text(f"loops with unknown trip counts, counted once: {', '.join(report.loops_counted_once)}"))
    parts.append(Text(_NOTES, style="dim"))
    findings = "; ".join(filter(None, [report.verdict, report.ranks]))
    if findings:
        parts.append(Text(findings, style="bold green" if report.is_right else "bold red"))
    return parts


def _table(title: str, *columns: str) -> Table:
    """Make a table; columns whose name begins with a space hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        is_number = column.startswith(" ")
        table.add_column(column.strip(), justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _graphs(report: GraphReport) -> Table:
    when = "in steps" if report.graphs_per_step else "runs"
    table = _table("graphs", " graph", when, " instructions", " FLOPs", " peak bytes", "requested by")
    for row in report.graphs:
        used = _ranges(row.steps) if report.graphs_per_step else str(len(row.steps))
        numbers = [str(row.number), used, f"{row.instructions:,}", f"{row.flops:,}", f"{row.peak_bytes:,}"]
        table.add_row(*numbers, row.asked_by or "the end of the step")
    return table


def _collectives(report: GraphReport) -> Table:
    columns = ("collective", "type", " per step", "axis", "groups", " bytes sent", "largest")
    table = _table(f"collectives of graph {report.main}", *columns)
    for row in report.collectives:
        groups = " ".join(str(list(group)) for group in row.groups[:4])
        more = f" and {len(row.groups) - 4} more" if len(row.groups) > 4 else ""
        numbers = [str(row.count), row.axis or "-", groups + more, f"{row.bytes_sent:,}"]
        table.add_row(row.kind, row.dtype, *numbers, row.largest)
    return table


def _memory(report: GraphReport) -> Table:
    memory = report.memory
    table = _table(f"memory of graph {report.main}, at its peak in {memory.peak_at}", "buffer", "shape", " bytes")
    table.add_row("arguments: weights, optimizer states, data", "", f"{memory.arguments:,}")
    for buffer in memory.largest:
        table.add_row(buffer.place, buffer.shape, f"{buffer.num_bytes:,}")
    others = memory.temporaries - sum(buffer.num_bytes for buffer in memory.largest)
    table.add_row("others", "", f"{others:,}")
    table.add_row("peak", "", f"{memory.peak:,}")
    return table


def _casts(report: GraphReport) -> Table:
    table = _table(f"casts of graph {report.main}", "from", "to", " per step", " bytes written", "where")
    for cast in report.casts[:NUM_CASTS]:
        table.add_row(cast.source, cast.target, str(cast.count), f"{cast.num_bytes:,}", cast.place)
    rest = report.casts[NUM_CASTS:]
    if rest:
        count, num_bytes = sum(cast.count for cast in rest), sum(cast.num_bytes for cast in rest)
        table.add_row("others", "", str(count), f"{num_bytes:,}", "")
    return table


def _ranges(steps: tuple[int, ...]) -> str:
    """Format (1, 2, 3, 5) as "1-3, 5"."""
    parts: list[list[int]] = []
    for step in dict.fromkeys(steps):
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
