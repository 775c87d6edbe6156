"""`python -m nxd_pipeline.timeline trace.json` prints the last step of a trace as text, and its idle time."""

import argparse

from nxd_pipeline.schedules import text_chart
from nxd_pipeline.timeline.trace_file import read_trace
from nxd_pipeline.timeline.traced_step import bubble_report


def main() -> None:
    """Takes a second, and leaves nothing behind."""
    parser = argparse.ArgumentParser(prog="python -m nxd_pipeline.timeline", description=__doc__)
    parser.add_argument("file", help="a file that NxDPPModel wrote to trace_file_path")
    parser.add_argument("--columns", type=int, default=100, help="width of the picture (default: %(default)s)")
    options = parser.parse_args()
    try:
        steps = read_trace(options.file)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for ranks, timeline in zip(steps[-1].pipelines, steps[-1].timelines, strict=True):
        print(f"step {steps[-1].number} of the pipeline of ranks {', '.join(map(str, ranks))}")
        print(text_chart(timeline, columns=options.columns), bubble_report(timeline), sep="")


if __name__ == "__main__":
    main()
