"""`nxd report`: a run as one HTML file, or in the terminal while it continues."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from nxd_cli.command import parse, reports_user_errors
from nxd_cli.output import printable

SECONDS_BETWEEN_LOOKS = 1.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nxd report",
        description="Write the report of a run into its folder: one HTML file with the curves of loss, throughput, "
        "gradient norm, learning rate and memory, the pipeline's timeline, the loads of experts, the checkpoints and "
        "the recipe. It loads nothing from the network.",
        epilog="examples: nxd report runs/nxd; nxd report runs/nxd --watch",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of nxd train")
    parser.add_argument("--watch", action="store_true", help="show the run here, until Ctrl-C, and write no file")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write the report, or show the run until Ctrl-C."""
    options = parse(_parser(), arguments)

    from nxd_trainer.report.run_page import records_of_run, write_run_page  # noqa: PLC0415

    if not options.watch:
        print(printable(str(reports_user_errors(lambda: write_run_page(options.run)))))
        return 0
    reports_user_errors(lambda: records_of_run(options.run))
    watch(options.run)
    return 0


def watch(folder: Path) -> None:
    """Show the summary and the last steps of a run in the terminal, until Ctrl-C."""
    from rich.console import Console, Group  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from nxd_trainer.report import render_summary  # noqa: PLC0415
    from nxd_trainer.report.progress import describe  # noqa: PLC0415
    from nxd_trainer.report.run_page import records_of_run  # noqa: PLC0415

    def shown() -> Group:
        records = records_of_run(folder)
        steps = [f"step {it.step} | {describe(it, held_out_loss=it.held_out_loss)}" for it in records[-10:]]
        return Group(render_summary(records, {}), "", *steps)

    with Live(shown(), console=Console(highlight=False, markup=False), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                live.update(shown(), refresh=True)
        except KeyboardInterrupt:
            return
