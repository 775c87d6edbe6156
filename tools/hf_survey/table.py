"""The verdicts as a Markdown table, put between markers in a document."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_survey.comparison import Layout
from hf_survey.survey import Verdict

BEGIN = "<!-- made by tools/hf_support.py: {name}, begin -->"
END = "<!-- made by tools/hf_support.py: {name}, end -->"


def make_table(verdicts: Sequence[Verdict], layouts: Sequence[Layout], transformers_version: str) -> str:
    """A row for each architecture, a column for each layout, and how many passed."""
    passed = Counter(verdict.layout for verdict in verdicts if verdict.outcome == "pass")
    rows: dict[str, dict[Layout, Verdict]] = {}
    for verdict in verdicts:
        rows.setdefault(verdict.model_type, {})[verdict.layout] = verdict
    counts = ", ".join(f"{passed[layout]} at {layout}" for layout in layouts)
    lines = [
        f"Tried: {len(rows)} architectures of transformers {transformers_version}. Passed: {counts}.",
        "",
        f"| architecture | {' | '.join(map(str, layouts))} |",
        f"| --- |{' --- |' * len(layouts)}",
    ]
    lines += [f"| {name} | {' | '.join(row[layout].outcome for layout in layouts)} |" for name, row in rows.items()]
    return "\n".join([*lines, *_reasons(rows)])


def _reasons(rows: Mapping[str, Mapping[Layout, Verdict]]) -> list[str]:
    """A line for each architecture and reason, with the layouts that it holds for."""
    lines = []
    for name, row in rows.items():
        layouts_by_reason: dict[str, list[str]] = {}
        for layout, verdict in row.items():
            if verdict.reason:
                layouts_by_reason.setdefault(verdict.reason, []).append(str(layout))
        lines += [f"- {name} at {', '.join(where)}: {why}" for why, where in layouts_by_reason.items()]
    return ["", "Reasons for the others:", "", *lines] if lines else []


def put_between_markers(document: Path, name: str, table: str) -> None:
    """Replace what stands between the markers of that name.

    Raises:
        ValueError: the document lacks them.
    """
    text = document.read_text()
    first, last = BEGIN.format(name=name), END.format(name=name)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{document} has no lines {first!r} and {last!r}; add them where the table is to be")
    document.write_text(f"{before}{first}\n\n{table}\n\n{last}{after}")
