"""`nxd doctor`: finds problems of this machine, or, with `--graph`, of a training step, and how to fix them."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_cli.command import UserError, parse, reports_user_errors
from nxd_cli.output import printable

if TYPE_CHECKING:
    from nxd_doctor.graph_report import GraphReport
    from nxd_doctor.recording import RecordedSteps

EXIT_WRONG = 1
RECORDERS = "nxd.graphs"  # entry points that record the steps of recipes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nxd doctor",
        usage="nxd doctor [--folder FOLDER] [--no-ranks] [--show-output]\n"
        "       nxd doctor --graph [RECIPE] [KEY=VALUE ...] [--ranks N] [--steps N] [--json]\n"
        "       nxd doctor --graph SCRIPT.py [--json] [-- ARGUMENT ...]",
        description="Look at versions, devices, limits, ports and the clock, and let two ranks add a number.",
        epilog="exit codes: 0 nothing is wrong (there may be warnings), 1 something is, 2 it could not be looked at",
    )
    parser.add_argument("--folder", help="a folder for checkpoints, to be looked at as well")
    parser.add_argument("--no-ranks", action="store_true", help="start no ranks, which takes some seconds")
    parser.add_argument("--show-output", action="store_true", help="show all that the two ranks write")
    graph = parser.add_argument_group(
        "the graph of a training step",
        "Instead of the machine: record what the device's compiler would get, with torch-xla on the CPU, and count it.",
    )
    graph.add_argument(
        "--graph", nargs="?", const="", metavar="FILE", help="of a recipe (defaults if unset) or a script"
    )
    graph.add_argument("arguments_of_graph", nargs="*", metavar="KEY=VALUE", help="of the recipe; or a script's own")
    graph.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of the job, of which the first and last are looked at; as few as fit",
    )
    graph.add_argument("--steps", type=int, default=3, metavar="N", help="how many steps of a recipe to record; 3")
    graph.add_argument("--json", action="store_true", help="print everything that was counted as JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print a line for each finding, and below it what to do; or the tables of a graph."""
    options = parse(_parser(), arguments)
    if options.graph is not None:
        return _run_graph(options)
    if options.arguments_of_graph:
        raise UserError(f"{options.arguments_of_graph[0]}: without --graph there is nothing to give")
    from nxd_doctor import examine  # noqa: PLC0415

    counts = {"ok": 0, "warning": 0, "wrong": 0}
    findings = examine(
        options.folder, try_ranks=not options.no_ranks, show_output=print if options.show_output else None
    )
    for finding in findings:
        counts[finding.status] += 1
        print(printable(f"{finding.status:7}  {finding.check}: {finding.found}"))
        if finding.mend:
            print(printable(f"{'':7}  -> {finding.mend}"), flush=True)
    warnings = f"{counts['warning']} warning{'' if counts['warning'] == 1 else 's'}"
    print(f"{'all is well' if not counts['wrong'] else str(counts['wrong']) + ' wrong'}, {warnings}")
    return EXIT_WRONG if counts["wrong"] else 0


def _run_graph(options: argparse.Namespace) -> int:
    from nxd_doctor.graph_report import render_report  # noqa: PLC0415

    look = _look_at_script if options.graph.endswith(".py") else _look_at_recipe
    report = reports_user_errors(lambda: look(options))
    if options.json:
        findings = {"verdict": report.verdict, "is_right": report.is_right}
        print(json.dumps(asdict(report) | findings, indent=2))
    else:
        render_report(report)
    return 0 if report.is_right else EXIT_WRONG


def _look_at_script(options: argparse.Namespace) -> "GraphReport":
    from nxd_doctor.graph_report import analyse  # noqa: PLC0415
    from nxd_doctor.recording import record_script  # noqa: PLC0415

    if not Path(options.graph).exists():
        raise ValueError(f"there is no script {options.graph}")
    command = [options.graph, *options.arguments_of_graph]
    return analyse(f"{' '.join(command)}, as one process", [record_script(command)], world_size=1)


def _look_at_recipe(options: argparse.Namespace) -> "GraphReport":
    from nxd_doctor.graph_report import analyse  # noqa: PLC0415

    [*recorders] = entry_points(group=RECORDERS)
    if not recorders:
        raise ValueError(
            f"{options.graph or 'a recipe'}: the steps of recipes are recorded by nxd-trainer, which is not installed; "
            "pip install nxd-trainer, or give a script (.py)"
        )
    record: Callable[..., RecordedSteps] = recorders[0].load()
    recorded = record(options.graph, options.arguments_of_graph, ranks=options.ranks, steps=options.steps)
    return analyse(recorded.title, recorded.ranks, world_size=recorded.world_size)
