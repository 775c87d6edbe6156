"""`nxd chaos`: kill, stop and slow ranks of a run, and report how the run copes."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from nxd_cli.command import UserError, make_parser, parse, reports_user_errors

if TYPE_CHECKING:
    from nxd_elastic.chaos import DisturbancePlan
    from nxd_elastic.chaos.follow import HasEnded

N = TypeVar("N", int, float)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "chaos",
        "Disturb random ranks of a run, and measure from its metrics: seconds from each lost rank to the "
        "next step, steps lost, goodput. The run should log every step (train.log_every=1). Linux only.",
        usage="nxd chaos --output FOLDER [options] (--pid PID | -- COMMAND ...)",
        examples=[
            "nxd chaos --output run --count 5 -- nxd train output=run --nproc 4 --elastic 2:4 train.log_every=1",
            "nxd chaos --output run --pid 4711 --kinds kill,pause --every-steps 5:20",
        ],
        exit_codes="those of COMMAND; 0 with --pid; 2 user error",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="the run's folder")
    parser.add_argument("--pid", type=int, help="the process that started the ranks of a running run")
    parser.add_argument("--seed", type=int, default=0, help="random seed for ranks and times (default: %(default)s)")
    parser.add_argument("--count", type=int, metavar="N", help="number of disturbances; unlimited if unset")
    parser.add_argument(
        "--kinds",
        default="kill",
        help="comma-separated: kill (SIGKILL), stop (SIGSTOP), pause (stop for up to 3 s), slow (stop in short turns), "
        "absent (kill, and delay the replacement), host (kill a launcher with its ranks) (default: %(default)s)",
    )
    parser.add_argument(
        "--every-steps",
        default="2:6",
        metavar="MIN:MAX",
        help="steps from a recovery to the next disturbance (default: %(default)s)",
    )
    parser.add_argument(
        "--every-seconds",
        metavar="MIN:MAX",
        help="seconds between disturbances, instead of steps, also during recoveries",
    )
    parser.add_argument("command_of_run", nargs="*", metavar="COMMAND", help="the command that starts a run, after --")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Disturb a run; the exit code is that of the command, if it is started here."""
    options = parse(_parser(), arguments)
    from nxd_elastic.chaos import FollowedRun, disturb, measure, render  # noqa: PLC0415

    if sys.platform != "linux":
        raise UserError("it finds ranks through /proc, which only Linux has")
    if (options.pid is None) == (not options.command_of_run):
        raise UserError("pass either --pid of a run, or the command that starts one after --")
    plan = reports_user_errors(lambda: _plan(options))
    process = reports_user_errors(lambda: _process(options))
    followed = FollowedRun(process, options.output)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that paused ranks continue when this process is ended
        signal.signal(number, _end)
    disturbances = disturb(followed, plan, _say)
    for line in render(measure(followed, disturbances), disturbances):
        _say(line)
    return process.poll() or 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


class _OtherProcess:
    """A process that was not started here."""

    def __init__(self, pid: int) -> None:
        from nxd_state.processes import Process  # noqa: PLC0415 - it loads torch

        self.pid = pid
        self._process, self._own = Process.of(pid), Process.of(os.getpid())

    def poll(self) -> int | None:
        """0 if it has ended: the exit code of another's child is unknown."""
        return 0 if self._process.has_ended(self._own) else None


def _process(options: argparse.Namespace) -> "HasEnded":
    return _OtherProcess(options.pid) if options.pid is not None else subprocess.Popen(options.command_of_run)


def _plan(options: argparse.Namespace) -> "DisturbancePlan":
    from nxd_elastic.chaos import DisturbancePlan  # noqa: PLC0415

    seconds = options.every_seconds
    return DisturbancePlan(
        options.seed,
        options.count,
        kinds=options.kinds.split(","),
        steps=_range("--every-steps", options.every_steps, int),
        seconds=None if seconds is None else _range("--every-seconds", seconds, float),
    )


def _range(name: str, text: str, kind: type[N]) -> tuple[N, N]:
    least, colon, most = text.partition(":")
    try:
        return kind(least), kind(most if colon else least)
    except ValueError as error:
        raise ValueError(f"{name} {text} is not a range; write MIN:MAX, such as 2:6") from error


def _say(line: str) -> None:
    print(f"nxd chaos: {time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
