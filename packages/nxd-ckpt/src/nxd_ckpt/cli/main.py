"""The command line: arguments in, a report out. `retain`, `delete`, `gc`, `pin` and `unpin` are here, too."""

import argparse
import json
import math
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nxd_ckpt.catalog import list_checkpoints
from nxd_ckpt.cli.conversion import DTYPES, TARGET_KINDS, Target, convert
from nxd_ckpt.cli.difference import diff
from nxd_ckpt.cli.formats import SOURCE_KINDS, Place, checkpoints_of, read_parameter_names, read_sharding, read_stages
from nxd_ckpt.cli.inspection import inspect_checkpoint, list_folder
from nxd_ckpt.cli.page import write_page
from nxd_ckpt.cli.report import EXIT_TROUBLE, Report, check_folder, human_size, table
from nxd_ckpt.cli.verification import verify, verify_all
from nxd_ckpt.errors import CheckpointError, printable
from nxd_ckpt.retention import delete, gc, pin, retain, unpin

_EXIT_CODES = "exit codes: 0 success, 1 damaged (verify) or different (diff), 2 bad arguments or unreadable checkpoint"
_EXAMPLES = {
    "list": ["nxd-ckpt list run/checkpoints"],
    "inspect": ["nxd-ckpt inspect run/checkpoints", "nxd-ckpt inspect run/checkpoints --tag step-00000100 --depth 2"],
    "verify": ["nxd-ckpt verify run/checkpoints --all", "nxd-ckpt verify s3://bucket/run --tag step-00000100 --deep"],
    "diff": [
        "nxd-ckpt diff run/checkpoints other/checkpoints",
        "nxd-ckpt diff run/checkpoints Qwen3-0.6B --include 'model.*' --rtol 1e-5",
    ],
    "page": ["nxd-ckpt page run/checkpoints -o page.html"],
    "convert": [
        "nxd-ckpt convert run/checkpoints exported --to hf --dtype bfloat16",
        "nxd-ckpt convert checkpoints exported --to hf --part model",
        "nxd-ckpt convert run/checkpoints shards --to neuronx-v2 --tp 8 --sharding llama --target-tag step_100",
    ],
    "retain": [
        "nxd-ckpt retain run/checkpoints --keep-last 3",
        "nxd-ckpt retain run/checkpoints --keep-last 1 --keep-best 2 --metric loss",
    ],
    "gc": ["nxd-ckpt gc run/checkpoints --dry-run"],
    "delete": ["nxd-ckpt delete run/checkpoints step-00000100"],
    "pin": ["nxd-ckpt pin run/checkpoints step-00000100"],
    "unpin": ["nxd-ckpt unpin run/checkpoints step-00000100"],
}
_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    options = make_parser().parse_args(arguments)
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
    if sys.stdout is None:  # closed by the caller, who only wants the exit code
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(data: Any) -> Any:
    """JSON has no NaN or infinities, so they become text, such as "nan"."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"nxd-ckpt: {_one_line(str(message))}", file=sys.stderr)


def _one_line(message: str) -> str:
    return printable(" ".join(line.strip() for line in message.splitlines()))


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; each one's `--help` ends with examples."""
    parser = argparse.ArgumentParser(
        prog="nxd-ckpt",
        description="Inspect, verify, compare and convert checkpoints. With nxd-cli installed, `nxd ckpt` is the same.",
        epilog=_end_of_help(_EXIT_CODES, [*_EXAMPLES["list"], *_EXAMPLES["verify"]]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", required=True)
    _add_list(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_diff(commands)
    _add_page(commands)
    _add_convert(commands)
    _add_removal(commands)
    _add_upkeep(commands)
    for name, command in commands.choices.items():
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.epilog = _end_of_help(command.epilog, _EXAMPLES[name])
    return parser


def _end_of_help(exit_codes: str | None, examples: Sequence[str]) -> str:
    return "\n".join([*([exit_codes, ""] if exit_codes else []), "examples:", *(f"  {it}" for it in examples)])


def _versions() -> str:
    lines = []
    for name in ("nxd-ckpt", "torch", "safetensors"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} (running from source, not installed)")
    return "\n".join([*lines, f"python {platform.python_version()}"])


def _add_list(commands: Any) -> None:
    parser = commands.add_parser("list", help="list the complete checkpoints in a folder, oldest first")
    parser.add_argument("path", type=checkpoints_of, help="folder of checkpoints or of a run, or a URL")
    parser.set_defaults(run=lambda options: list_folder(options.path))


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="show a checkpoint's contents: tree, shapes, sizes, writing ranks")
    _add_place(parser)
    parser.add_argument(
        "--depth", type=_number_of_levels, metavar="N", help="tree levels to show; deeper levels are summarized"
    )
    parser.set_defaults(run=lambda options: inspect_checkpoint(_place(options), depth=options.depth))


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="check that a checkpoint is complete and undamaged",
        description="Checks the manifest's digest, that every element of every tensor is stored, and the file sizes.",
        epilog="exit codes: 0 no damage found, 1 damaged, 2 the checkpoint could not be checked",
    )
    parser.add_argument(
        "path", type=checkpoints_of, help="folder of checkpoints or of a run, one checkpoint's folder, or a URL"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tag", help="checkpoint to verify; default: the newest")
    which.add_argument("--all", action="store_true", help="verify every checkpoint of the folder")
    parser.add_argument("--deep", action="store_true", help="read all data and verify its checksums")
    parser.set_defaults(
        run=lambda options: (
            verify_all(options.path, deep=options.deep)
            if options.all
            else verify(options.path, options.tag, deep=options.deep)
        )
    )


def _add_diff(commands: Any) -> None:
    parser = commands.add_parser(
        "diff", help="compare two checkpoints", epilog="exit codes: 0 equal, 1 different, 2 error"
    )
    parser.add_argument(
        "first", type=checkpoints_of, help="folder of checkpoints or of a run, or one checkpoint of any format"
    )
    parser.add_argument("second", type=checkpoints_of, help="same as for first")
    parser.add_argument("--first-tag", metavar="TAG", help="checkpoint in the first folder; default: the newest")
    parser.add_argument("--second-tag", metavar="TAG", help="checkpoint in the second folder; default: the newest")
    parser.add_argument("--rtol", type=_tolerance, help="relative tolerance; default without --atol: compare bits")
    parser.add_argument("--atol", type=_tolerance, help="absolute tolerance")
    _add_sharding(parser)
    _add_selection(parser)
    parser.set_defaults(run=_diff)


def _add_page(commands: Any) -> None:
    parser = commands.add_parser("page", help="write an HTML page: tree, sizes, value histograms, writing ranks")
    _add_place(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write")
    parser.set_defaults(run=lambda options: write_page(_place(options), options.output))


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser("convert", help="convert a checkpoint to another format")
    _add_place(parser)
    parser.add_argument("target", help="folder to write to, or a URL for nxd")
    parser.add_argument("--to", required=True, choices=TARGET_KINDS, help="format to write")
    parser.add_argument(
        "--part", metavar="PATH", help="write the tensors below PATH, such as model, without it in names"
    )
    parser.add_argument("--target-tag", metavar="TAG", help="name of the new checkpoint, for nxd and neuronx-v2")
    parser.add_argument("--step", type=int, help="step of the new checkpoint, for nxd (default: as the source)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of floating-point tensors; default: as stored")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file, for hf (default: 5GB)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="number of tensor-parallel ranks, for neuronx")
    parser.add_argument("--stages", metavar="FILE", help="JSON file {name pattern: pipeline rank}, for neuronx")
    parser.add_argument("--xser", action="store_true", help="write each tensor to its own file, for neuronx")
    parser.add_argument(
        "--parameter-names", metavar="FILE", help="JSON list of names in the optimizer's order, for a neuronx source"
    )
    parser.add_argument(
        "--trust-user-content", action="store_true", help="allow pickled user content of a neuronx source to run code"
    )
    _add_selection(parser)
    parser.set_defaults(run=_convert)


def _add_upkeep(commands: Any) -> None:
    parser = commands.add_parser("gc", help="delete the remains of failed saves and deletions")
    parser.add_argument("path", type=checkpoints_of, help="folder of checkpoints or of a run, or a URL")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be deleted")
    parser.set_defaults(run=lambda options: _collect_garbage(options.path, dry_run=options.dry_run))
    for name, text, run in (
        ("delete", "delete a checkpoint", _delete),
        ("pin", "protect a checkpoint from deletion", partial(_set_pinned, to=True)),
        ("unpin", "allow a pinned checkpoint to be deleted", partial(_set_pinned, to=False)),
    ):
        parser = commands.add_parser(name, help=text)
        parser.add_argument("path", type=checkpoints_of, help="folder of checkpoints or of a run, or a URL")
        parser.add_argument("tag", help="name of the checkpoint")
        parser.set_defaults(run=lambda options, run=run: run(options.path, options.tag))


def _add_removal(commands: Any) -> None:
    parser = commands.add_parser(
        "retain",
        help="delete checkpoints that no rule keeps",
        description="Never deletes the newest checkpoint, pinned ones, or incomplete ones.",
    )
    parser.add_argument("path", type=checkpoints_of, help="folder of checkpoints or of a run, or a URL")
    parser.add_argument("--keep-last", type=int, required=True, metavar="N", help="keep the N newest")
    parser.add_argument("--keep-every", type=int, metavar="N", help="keep those whose step is a multiple of N")
    parser.add_argument("--keep-best", type=int, default=0, metavar="N", help="keep the N best by --metric")
    parser.add_argument("--metric", metavar="NAME", help="name of a saved metric, such as loss")
    parser.add_argument("--best", choices=("lowest", "highest"), default="lowest", help="which --metric is best")
    rules = ("keep_last", "keep_every", "keep_best", "metric", "best")
    parser.set_defaults(run=lambda it: _retain(it.path, **{name: getattr(it, name) for name in rules}))


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=checkpoints_of, help="folder of checkpoints or of a run, one checkpoint of any format, or a URL"
    )
    parser.add_argument("--tag", help="checkpoint to use; default: the newest")
    parser.add_argument("--from", dest="kind", choices=SOURCE_KINDS, help="its format; default: detected")
    _add_sharding(parser)


def _add_sharding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sharding",
        metavar="FILE",
        help='"llama", or a JSON file {pattern: {"dim": 0, "stride": 1}}, for neuronx; '
        '"llama" with --to hf also splits gate_up_proj',
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    for name, text in (
        ("include", "use only names that match, such as 'model.*'"),
        ("exclude", "skip names that match"),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="PATTERN", help=f"{text}; repeatable")


def _tolerance(text: str) -> float:
    if not float(text) >= 0:
        raise ValueError
    return float(text)


def _number_of_levels(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


# argparse shows the name of the type in "invalid ... value".
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
    return convert(place, target, include=options.include, exclude=options.exclude, part=options.part)


def _collect_garbage(path: str, *, dry_run: bool) -> Report:
    """Remove, or only list, the remains of failed saves and deletions."""
    check_folder(path)
    found = gc(path, dry_run=dry_run)
    total = sum(item.num_bytes for item in found)
    lines = list(table([(item.path, human_size(item.num_bytes)) for item in found])) if found else []
    lines.append(f"{'would free' if dry_run else 'freed'} {human_size(total)} in {len(found)} places")
    return Report({"dry_run": dry_run, "bytes": total, "garbage": [asdict(item) for item in found]}, lines)


def _set_pinned(path: str, tag: str, *, to: bool) -> Report:
    check_folder(path)
    (pin if to else unpin)(path, tag)
    return Report({"tag": tag, "pinned": to}, [f"{tag} is {'pinned' if to else 'not pinned'}"])


def _retain(path: str, **rules: Any) -> Report:
    check_folder(path)
    removed = retain(path, **rules)
    return Report({"removed": removed}, [f"removed {', '.join(removed)}" if removed else "removed nothing"])


def _delete(path: str, tag: str) -> Report:
    check_folder(path)
    delete(path, tag)
    left = list_checkpoints(path)
    return Report(
        {"removed": [tag]}, [f"removed {tag}; {f'the newest is {left[-1].tag}' if left else 'no checkpoint is left'}"]
    )
