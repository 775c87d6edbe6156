"""`nxd doctor`: what is wrong with this machine, and how to mend it."""

import argparse
from pathlib import Path

from nxd_trainer.cli.command import Commands

EXIT_WRONG = 1


def add_parser(commands: Commands) -> None:
    """Add `doctor` to the commands."""
    parser = commands.add_parser(
        "doctor",
        help="say what is wrong with this machine, and how to mend it",
        description="Look at versions, devices, limits, ports and the clock, and let two ranks add a number.",
        epilog="exit codes: 0 nothing is wrong (there may be warnings), 1 something is",
    )
    parser.add_argument("--folder", type=Path, help="a folder for checkpoints, to be looked at as well")
    parser.add_argument("--no-ranks", action="store_true", help="start no ranks, which takes some seconds")
    parser.add_argument("--show-output", action="store_true", help="show all that the two ranks write")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each finding, and below it what to do."""
    from nxd_trainer.doctor import examine  # noqa: PLC0415

    counts = {"ok": 0, "warning": 0, "wrong": 0}
    findings = examine(
        options.folder, try_ranks=not options.no_ranks, show_output=print if options.show_output else None
    )
    for finding in findings:
        counts[finding.status] += 1
        print(f"{finding.status:7}  {finding.check}: {finding.found}")
        if finding.mend:
            print(f"{'':7}  -> {finding.mend}", flush=True)
    warnings = f"{counts['warning']} warning{'' if counts['warning'] == 1 else 's'}"
    print(f"{'all is well' if not counts['wrong'] else str(counts['wrong']) + ' wrong'}, {warnings}")
    return EXIT_WRONG if counts["wrong"] else 0
