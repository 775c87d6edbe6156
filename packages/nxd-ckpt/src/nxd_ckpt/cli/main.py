"""The command line: arguments in, a report out. The work is in the other files of this folder."""

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nxd_ckpt.cli.conversion import DTYPES, TARGET_KINDS, Target, convert
from nxd_ckpt.cli.difference import diff
from nxd_ckpt.cli.formats import SOURCE_KINDS, Place, read_parameter_names, read_sharding, read_stages
from nxd_ckpt.cli.inspection import inspect_checkpoint, list_folder
from nxd_ckpt.cli.page import write_page
from nxd_ckpt.cli.report import EXIT_TROUBLE, Report
from nxd_ckpt.cli.upkeep import collect_garbage, delete_one, retain_newest, set_pinned
from nxd_ckpt.cli.verification import verify
from nxd_ckpt.errors import CheckpointError, printable

_EXIT_CODES = "exit codes: 0 good or done, 1 damaged (verify) or different (diff), 2 a mistake, or it cannot be told"
_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit code."""
    options = _make_parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\b")
            warnings.showwarning = _show_warning
            report: Report = options.run(options)
    except (ValueError, OSError, ImportError, MemoryError, RecursionError, CheckpointError) as error:
        message = str(error) or type(error).__name__
        if options.json:
            _print(json.dumps({"error": message}))
        print(f"nxd-ckpt {options.command}: {_one_line(message)}", file=sys.stderr)
        return EXIT_TROUBLE
    except KeyboardInterrupt:
        print(f"nxd-ckpt {options.command}: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    _print(json.dumps(_finite(report.data), indent=2) if options.json else "\n".join(report.lines))
    return report.exit_code


def _print(text: str) -> None:
    if sys.stdout is None:  # closed by the caller, who wants the exit code alone
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(data: Any) -> Any:
    """JSON has no NaN and no infinities: they are text, such as "nan"."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"nxd-ckpt: {_one_line(str(message))}", file=sys.stderr)


def _one_line(message: str) -> str:
    return printable(" ".join(line.strip() for line in message.splitlines()))


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nxd-ckpt", description="Look at, check, compare and convert checkpoints.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"nxd-ckpt {_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_list(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_diff(commands)
    _add_page(commands)
    _add_convert(commands)
    _add_removal(commands)
    _add_upkeep(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _version() -> str:
    try:
        return version("nxd-ckpt")
    except PackageNotFoundError:
        return "of a source tree that is not installed"


def _add_list(commands: Any) -> None:
    parser = commands.add_parser("list", help="the complete checkpoints of a folder, oldest first")
    parser.add_argument("path", help="folder of checkpoints, or a URL")
    parser.set_defaults(run=lambda options: list_folder(options.path))


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="what is in a checkpoint: tree, shapes, sizes, who wrote what")
    _add_place(parser)
    parser.add_argument(
        "--depth", type=_number_of_levels, metavar="N", help="levels of the tree; what is below is summed up"
    )
    parser.set_defaults(run=lambda options: inspect_checkpoint(_place(options), depth=options.depth))


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="is a checkpoint whole",
        description="Checks the manifest's digest, that every element has its place, and the files' sizes.",
        epilog="exit codes: 0 good, 1 damaged, 2 it cannot be told",
    )
    parser.add_argument("path", help="folder of checkpoints, one checkpoint's folder, or a URL")
    parser.add_argument("--tag", help="which checkpoint; the newest if unset")
    parser.add_argument("--deep", action="store_true", help="read everything and compare it with its checksums")
    parser.set_defaults(run=lambda options: verify(options.path, options.tag, deep=options.deep))


def _add_diff(commands: Any) -> None:
    parser = commands.add_parser(
        "diff", help="what differs between two checkpoints", epilog="exit codes: 0 equal, 1 different, 2 a mistake"
    )
    parser.add_argument("first", help="folder of checkpoints, or of one, of any format")
    parser.add_argument("second", help="likewise")
    parser.add_argument("--first-tag", metavar="TAG", help="which checkpoint of the first folder; the newest if unset")
    parser.add_argument("--second-tag", metavar="TAG", help="likewise of the second")
    parser.add_argument("--rtol", type=_tolerance, help="relative tolerance; bit by bit if unset, as --atol")
    parser.add_argument("--atol", type=_tolerance, help="absolute tolerance")
    _add_sharding(parser)
    _add_selection(parser)
    parser.set_defaults(run=_diff)


def _add_page(commands: Any) -> None:
    parser = commands.add_parser("page", help="one HTML file: tree, sizes, histograms of values, who wrote what")
    _add_place(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write")
    parser.set_defaults(run=lambda options: write_page(_place(options), options.output))


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser("convert", help="from any format to any other")
    _add_place(parser)
    parser.add_argument("target", help="folder to write to; for nxd also a URL")
    parser.add_argument("--to", required=True, choices=TARGET_KINDS, help="format to write")
    parser.add_argument("--target-tag", metavar="TAG", help="name of the new checkpoint, for nxd and neuronx-v2")
    parser.add_argument("--step", type=int, help="step of the new checkpoint, for nxd")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating-point tensors; as stored if unset")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of files, for hf (default: 5GB)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks, for neuronx")
    parser.add_argument("--stages", metavar="FILE", help="JSON {pattern of names: pipeline rank}, for neuronx")
    parser.add_argument("--xser", action="store_true", help="a file for each tensor, for neuronx")
    parser.add_argument("--parameter-names", metavar="FILE", help="JSON list in the optimizer's order, of neuronx")
    parser.add_argument(
        "--trust-user-content", action="store_true", help="let the pickled user content of neuronx run code"
    )
    _add_selection(parser)
    parser.set_defaults(run=_convert)


def _add_upkeep(commands: Any) -> None:
    parser = commands.add_parser("gc", help="free what dead saves and deletions have left")
    parser.add_argument("path", help="folder of checkpoints, or a URL")
    parser.add_argument("--dry-run", action="store_true", help="only list it")
    parser.set_defaults(run=lambda options: collect_garbage(options.path, dry_run=options.dry_run))
    for name, text, run in (
        ("delete", "remove one checkpoint", delete_one),
        ("pin", "keep a checkpoint from deletion", partial(set_pinned, to=True)),
        ("unpin", "end that", partial(set_pinned, to=False)),
    ):
        parser = commands.add_parser(name, help=text)
        parser.add_argument("path", help="folder of checkpoints, or a URL")
        parser.add_argument("tag", help="which checkpoint")
        parser.set_defaults(run=lambda options, run=run: run(options.path, options.tag))


def _add_removal(commands: Any) -> None:
    parser = commands.add_parser(
        "retain",
        help="remove the checkpoints that no rule keeps",
        description="The newest and pinned ones stay in any case, and those that are not complete.",
    )
    parser.add_argument("path", help="folder of checkpoints, or a URL")
    parser.add_argument("--keep-last", type=int, required=True, metavar="N", help="keep so many of the newest")
    parser.add_argument("--keep-every", type=int, metavar="N", help="keep those whose step is a multiple of this")
    parser.add_argument("--keep-best", type=int, default=0, metavar="N", help="keep so many of the best by --metric")
    parser.add_argument("--metric", metavar="NAME", help="a number in the metrics that were saved along, such as loss")
    parser.add_argument("--best", choices=("lowest", "highest"), default="lowest", help="of --metric")
    rules = ("keep_last", "keep_every", "keep_best", "metric", "best")
    parser.set_defaults(run=lambda it: retain_newest(it.path, **{name: getattr(it, name) for name in rules}))


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="folder of checkpoints, or of one, of any format; or a URL")
    parser.add_argument("--tag", help="which checkpoint; the newest if unset")
    parser.add_argument("--from", dest="kind", choices=SOURCE_KINDS, help="its format; found out if unset")
    _add_sharding(parser)


def _add_sharding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sharding", metavar="FILE", help='"llama", or JSON {pattern: {"dim": 0, "stride": 1}}, for neuronx'
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    for name, text in (("include", "take only names that match, such as 'model.*'"), ("exclude", "leave out names")):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="PATTERN", help=f"{text}; repeatable")


def _tolerance(text: str) -> float:
    if not float(text) >= 0:
        raise ValueError
    return float(text)


def _number_of_levels(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


# argparse names a type in "invalid ... value".
_tolerance.__name__, _number_of_levels.__name__ = "tolerance", "number of levels"


def _place(options: argparse.Namespace) -> Place:
    sharding = None if options.sharding is None else read_sharding(options.sharding)
    return Place(options.path, options.tag, options.kind, sharding)


def _diff(options: argparse.Namespace) -> Report:
    sharding = None if options.sharding is None else read_sharding(options.sharding)
    return diff(
        Place(options.first, options.first_tag, sharding=sharding),
        Place(options.second, options.second_tag, sharding=sharding),
        rtol=options.rtol,
        atol=options.atol,
        include=options.include,
        exclude=options.exclude,
    )


def _convert(options: argparse.Namespace) -> Report:
    sharding = None if options.sharding is None else read_sharding(options.sharding)
    names = None if options.parameter_names is None else read_parameter_names(options.parameter_names)
    place = Place(options.path, options.tag, options.kind, sharding, names, options.trust_user_content)
    target = Target(
        path=options.target,
        kind=options.to,
        tag=options.target_tag,
        dtype=None if options.dtype is None else DTYPES[options.dtype],
        step=options.step,
        max_shard_size=options.max_shard_size,
        sharding=sharding,
        tensor_parallel_size=options.tp,
        stages=None if options.stages is None else read_stages(options.stages),
        xser=options.xser,
    )
    return convert(place, target, include=options.include, exclude=options.exclude)
