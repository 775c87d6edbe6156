"""`nxd-parity`: the command line of recordings."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_parity.run import Recorded, add_options, record_both

if TYPE_CHECKING:
    from nxd_parity.report import Report

EXIT_DIFFERENT = 3
EXIT_INTERRUPTED = 130  # as a shell says of a program that Ctrl-C ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 all agree, 2 user error, 3 something differs."""
    options = _parser().parse_args(arguments)
    from nxd_parity import compare  # noqa: PLC0415

    try:
        recorded = options.recordings(options)
        report = compare(
            recorded.reference,
            recorded.candidate,
            spread=recorded.spread,
            rtol=options.rtol,
            shards=dict(options.shard),
        )
        report.notes += recorded.notes
        return write_report(report, options)
    except (ValueError, OSError) as error:
        print(f"nxd-parity: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("nxd-parity: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say in which forms a report is written; `write_report` takes them."""
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page, which needs no network")
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="write a summary in Markdown; it is appended to the file that $GITHUB_STEP_SUMMARY names",
    )


def write_report(report: "Report", options: argparse.Namespace) -> int:
    """Write a report in the forms that the options name: on one screen of a terminal, as plain text if it is none.

    Returns:
        the exit code: 0 all agree, 3 something differs.

    Raises:
        OSError: a file cannot be written.
    """
    if options.html is not None:
        from nxd_parity.html import to_html  # noqa: PLC0415

        options.html.write_text(to_html(report), encoding="utf-8")
    if options.markdown is not None:
        from nxd_parity.markdown import write_markdown  # noqa: PLC0415

        write_markdown(report, options.markdown)
    if options.json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    elif sys.stdout.isatty():
        from nxd_parity.terminal import show  # noqa: PLC0415

        show(report)
    else:
        print(report)
    return 0 if report.agrees else EXIT_DIFFERENT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nxd-parity", description="Find the first tensor that a distributed program computes differently."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    of_compare = commands.add_parser(
        "compare",
        help="compare two recordings",
        description="Compare a recording of nxd_parity.record with that of one process, tensor by tensor in the order "
        "of execution, and name the first that differs. A reference of several ranks is compared rank by rank.",
        epilog="exit codes: 0 all agree, 2 user error, 3 something differs",
    )
    of_compare.add_argument("reference", metavar="REFERENCE", help="folder of the recording of one process")
    of_compare.add_argument("candidate", metavar="CANDIDATE", help="folder of the recording of all ranks")
    of_compare.add_argument(
        "--spread",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="recordings of the reference with noise; differences within their spread are rounding",
    )
    of_compare.set_defaults(
        recordings=lambda it: Recorded(Path(it.reference), Path(it.candidate), list(map(Path, it.spread)), [])
    )
    of_run = commands.add_parser(
        "run",
        help="run two programs, record and compare them",
        description="Run a program in one process and as it is distributed, record both without a change of their "
        "code, and compare them. A program that trains on is ended once its steps are recorded.",
        epilog="exit codes: 0 all agree, 2 user error (a command that fails, too), 3 something differs",
    )
    add_options(of_run)
    of_run.set_defaults(recordings=record_both)
    for command in (of_compare, of_run):
        _add_comparison_options(command)
    return parser


def _add_comparison_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rtol", type=float, metavar="R", help="tolerance, relative to a tensor's largest value")
    command.add_argument(
        "--shard",
        action="append",
        default=[],
        type=_rule,
        metavar="PATTERN=DIM",
        help="parameters that ranks have in equal parts along a dim, where their initial values do not show it",
    )
    add_report_options(command)


def _rule(text: str) -> tuple[str, int]:
    pattern, _, dim = text.partition("=")
    try:
        return pattern, int(dim)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=DIM, such as '*.down_proj.weight=1'") from None
