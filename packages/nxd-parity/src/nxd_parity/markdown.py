"""The report as a summary in Markdown, as GitHub shows it."""

import os
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from nxd_parity import events
from nxd_parity.report import AGREES, Report, printable
from nxd_parity.summary import count, facts, headline, step_title

MOST_LINES = 20
MOST_STEPS = 20
SUMMARY = "GITHUB_STEP_SUMMARY"


def to_markdown(report: Report) -> str:
    """Return a summary of a report."""
    verdict = "✅ Equal" if report.agrees else "❌ Different"
    lines = [f"### {verdict}: {_text(headline(report))}", ""]
    if report.first is not None:
        lines += ["| the first difference | |", "| --- | --- |"]
        lines += [f"| {label} | {_text(text)} |" for label, text in facts(report)]
        lines.append("")
    lines += [*_counts(report), ""]
    lines += _list("differences after it", [str(it) for it in report.findings[1:]])
    lines += _list("not compared", [f"{name}: {reason}" for name, reason in report.not_compared.items()])
    lines += _list("notes", report.notes)
    return "\n".join(lines)


def write_markdown(report: Report, path: Path) -> None:
    """Write the summary of a report into a file; it is appended to the file that $GITHUB_STEP_SUMMARY names."""
    summary = os.environ.get(SUMMARY)
    is_shared = bool(summary) and path.absolute() == Path(summary or "").absolute()
    with path.open("a" if is_shared else "w", encoding="utf-8") as file:
        file.write(to_markdown(report))


def _text(text: str) -> str:
    """Return a text that is shown as it is: no markup, no link, no end of a cell, nobody mentioned."""
    marked = re.sub(r"([\\`*_\[\]|~$]|:(?=//))", r"\\\1", escape(printable(text), quote=False))
    return marked.replace("@", "@\u200b")


def _counts(report: Report) -> Iterator[str]:
    of_steps = count(report)
    kinds = [kind for kind in events.KINDS if any(kind in it for it in of_steps.values())]
    yield f"| tensors that agree | {' | '.join(kinds)} |"
    yield f"| --- |{' ---: |' * len(kinds)}"
    wrong = [step for step, of_kind in of_steps.items() if any(it[AGREES] < it.total() for it in of_kind.values())]
    begin = max(list(of_steps).index(wrong[0]) - 1, 0) if wrong else 0
    for step in list(of_steps)[begin : begin + MOST_STEPS]:
        cells = [of_steps[step].get(kind) for kind in kinds]
        texts = ["" if it is None else f"{it[AGREES]} of {it.total()}" for it in cells]
        yield f"| {step_title(step)} | {' | '.join(texts)} |"
    if len(of_steps) > MOST_STEPS:
        yield ""
        yield f"{len(of_steps)} steps were compared."


def _list(title: str, lines: list[str]) -> Iterator[str]:
    if not lines:
        return
    yield f"<details><summary>{title} ({len(lines)})</summary>"
    yield ""
    yield from (f"- {_text(it)}" for it in lines[:MOST_LINES])
    if len(lines) > MOST_LINES:
        yield f"- and {len(lines) - MOST_LINES} more"
    yield ""
    yield "</details>"
    yield ""
