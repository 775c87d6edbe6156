"""`nxd report`: a run as one HTML file, or in the terminal while it continues."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from nxd_cli.command import make_parser, parse, reports_user_errors
from nxd_cli.output import printable


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "report",
        "Write the report of a run into its folder: one HTML file with the curves of loss, throughput, "
        "gradient norm, learning rate and memory, the pipeline's timeline, the loads of experts, memory by kind, "
        "messages by axis, the data, warnings, checkpoints, the environment and the recipe. It loads nothing from the "
        "network.",
        examples=["nxd report runs/nxd", "nxd report runs/nxd --watch"],
        exit_codes="with --watch 1 if the run has failed or was killed",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of nxd train")
    parser.add_argument(
        "--watch", action="store_true", help="show the run here until it is over, or Ctrl-C, and write no file"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write the report, or show the run until it is over."""
    options = parse(_parser(), arguments)
    if options.watch:
        from rich.console import Console  # noqa: PLC0415

        from nxd_trainer.report.live import watch  # noqa: PLC0415
        from nxd_trainer.report.run_log import has_failed, read_events  # noqa: PLC0415

        reports_user_errors(lambda: watch(options.run, Console(highlight=False, markup=False)))
        return 1 if has_failed(read_events(options.run)) else 0

    from nxd_trainer.report.run_page import write_run_page  # noqa: PLC0415

    print(printable(str(reports_user_errors(lambda: write_run_page(options.run)))))
    return 0
