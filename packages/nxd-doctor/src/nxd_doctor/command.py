"""`nxd doctor`: finds problems of this machine, or, with `--graph`, of a training step, and how to fix them."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_cli.command import UserError, make_parser, parse, reports_user_errors
from nxd_cli.output import printable

if TYPE_CHECKING:
    from nxd_doctor.graph_report import GraphReport
    from nxd_doctor.recording import RecordedSteps

EXIT_WRONG = 1
RECORDERS = "nxd.graphs"  # entry points that record the steps of recipes


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "doctor",
        "Check versions, devices, limits, ports and the clock, and run a collective on two ranks.",
        usage="nxd doctor [--folder FOLDER] [--no-ranks] [--show-output]\n"
        "       nxd doctor --graph [RECIPE] [KEY=VALUE ...] [--ranks N] [--steps N] [--json]\n"
        "       nxd doctor --graph SCRIPT.py [--json] [-- ARGUMENT ...]",
        examples=[
            "nxd doctor",
            "nxd doctor --no-ranks --folder /data/checkpoints",
            "nxd doctor --graph recipe.toml --ranks 4",
        ],
        exit_codes="0 nothing is wrong (there may be warnings), 1 something is wrong, 2 user error",
    )
    parser.add_argument("--folder", help="a checkpoint folder to check as well")
    parser.add_argument(
        "--no-ranks", action="store_true", help="skip the check with two ranks, which takes some seconds"
    )
    parser.add_argument("--show-output", action="store_true", help="show everything that the two ranks print")
    graph = parser.add_argument_group(
        "the graph of a training step",
        "Instead of the machine: record the graphs that the device's compiler would get, with torch-xla on the CPU, "
        "and count their work.",
    )
    graph.add_argument("--graph", nargs="?", const="", metavar="FILE", help="a recipe (defaults if unset) or a script")
    graph.add_argument(
        "arguments_of_graph", nargs="*", metavar="KEY=VALUE", help="recipe keys, or the script's arguments"
    )
    graph.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks in the job; the first and last are recorded (default: the fewest that fit)",
    )
    graph.add_argument(
        "--steps", type=int, default=3, metavar="N", help="number of steps of a recipe to record (default: 3)"
    )
    graph.add_argument("--json", action="store_true", help="print all counts as JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print a line for each finding, with the fix below it; or the tables of a graph."""
    options = parse(_parser(), arguments)
    if options.graph is not None:
        return _run_graph(options)
    if options.arguments_of_graph:
        raise UserError(f"unexpected argument {options.arguments_of_graph[0]}; only --graph takes arguments")
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
    print(f"{'no problems' if not counts['wrong'] else str(counts['wrong']) + ' wrong'}, {warnings}")
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
        raise ValueError(f"script {options.graph} does not exist")
    command = [options.graph, *options.arguments_of_graph]
    return analyse(f"{' '.join(command)}, as one process", [record_script(command)], world_size=1)


def _look_at_recipe(options: argparse.Namespace) -> "GraphReport":
    from nxd_doctor.graph_report import analyse  # noqa: PLC0415

    [*recorders] = entry_points(group=RECORDERS)
    if not recorders:
        raise ValueError(
            f"{options.graph or 'a recipe'}: recording a recipe needs nxd-trainer, which is not installed; "
            "pip install nxd-trainer, or pass a script (.py)"
        )
    record: Callable[..., RecordedSteps] = recorders[0].load()
    recorded = record(options.graph, options.arguments_of_graph, ranks=options.ranks, steps=options.steps)
    return analyse(recorded.title, recorded.ranks, world_size=recorded.world_size, degrees=recorded.degrees)
