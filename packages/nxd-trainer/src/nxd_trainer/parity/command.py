"""`nxd parity`: checks that a layout computes the same as one process, and finds the first tensor that differs."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nxd_cli.command import (
    UserError,
    add_nproc,
    check_own_process,
    import_named,
    leave_mesh,
    make_parser,
    parse,
    reports_user_errors,
    started_ranks,
    take_settings,
)
from nxd_cli.launch import own_threads

if TYPE_CHECKING:
    from nxd_trainer.parity import ParityCase

SWITCHES = ("help", "json")
FLAGS = (
    *("nproc", "dtype", "rtol", "compare-steps", "resume-at", "device", "hf", "served", "folder", "html", "markdown"),
    *SWITCHES,
)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "parity",
        "Train a few steps in a layout and in one process, without dropout, and name the first tensor that "
        "differs, in execution order: module outputs, loss, gradients, optimizer states, weights. The keys are those "
        "of nxd train; with --hf, those of the model's config.",
        usage="nxd parity [RECIPE | MODULE:FUNCTION | --hf FOLDER] [--nproc N] [--dtype D] [--KEY VALUE ...]\n"
        "       nxd parity --served FOLDER [--nproc N]",
        examples=[
            "nxd parity recipe.toml --nproc 4 parallel.tensor_parallel_size=2",
            "nxd parity recipe.toml --nproc 2 parallel.pipeline_parallel_size=2 --resume-at 2 --html report.html",
            "nxd parity --hf Qwen3-0.6B --nproc 2",
            "nxd parity my_models:case --nproc 2 --dtype float32",
            "nxd parity --served Qwen3-0.6B --nproc 2",
        ],
        exit_codes="0 all agree, 1 a rank has failed, 2 user error, 3 something differs",
    )
    parser.add_argument(
        "case",
        nargs="?",
        metavar="RECIPE",
        help="a recipe of nxd train (defaults if unset), or MODULE:FUNCTION that returns a ParityCase; layers that are "
        "compiled by train.compile=true are compared with those that are not",
    )
    parser.add_argument(
        "--hf",
        type=Path,
        metavar="FOLDER",
        help="compare a small model of the architecture in FOLDER/config.json, split by its own plan over the ranks "
        "(2 if unset); if all agrees, models of that type are split by their own plan from then on",
    )
    parser.add_argument(
        "--served",
        type=Path,
        metavar="FOLDER",
        help="compare the model in FOLDER as nxd serve runs it, on --nproc workers, with its plain forward",
    )
    parser.add_argument(
        "--compare-steps", type=int, default=2, metavar="N", help="steps to compare (default: %(default)s)"
    )
    parser.add_argument(
        "--resume-at",
        type=int,
        default=0,
        metavar="N",
        help="train N steps before, with the ranks as replicas, and load their checkpoint at the layout; one process "
        "is not interrupted",
    )
    parser.add_argument(
        "--device",
        metavar="TYPE",
        help="compare the layout on a device, such as cuda or xla, with one process on the CPU",
    )
    parser.add_argument(
        "--dtype",
        choices=["float64", "float32", "bfloat16"],
        default="float64",
        help="in the last two, differences within the spread of runs of one process with rounding noise are rounding "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--rtol",
        type=float,
        metavar="R",
        help="tolerance, relative to a tensor's largest value, instead of rounding noise (default: 1e-10 in float64; "
        "float32: 1e-5 or rounding)",
    )
    add_nproc(parser)
    output = parser.add_argument_group("the report")
    output.add_argument("--json", action="store_true", help="print it as JSON")
    output.add_argument("--html", type=Path, metavar="FILE", help="write it as a page, which needs no network")
    output.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary in Markdown")
    output.add_argument("--folder", type=Path, help="keep the recordings in a new folder, which all ranks share")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Compare, on the ranks that the command line asks for, and print the report."""
    remaining, settings = take_settings(arguments, FLAGS, without_value=SWITCHES)
    options = parse(_parser(), remaining)
    if options.served is not None:
        return _compare_served(options, settings)
    if options.hf is not None and options.nproc is None:
        options.nproc = 2
    code = started_ranks(options.nproc, "parity", arguments)
    if code is not None:
        return code
    if options.device is not None:
        os.environ["NXD_DEVICE"] = options.device  # before anything asks for the device

    import torch  # noqa: PLC0415
    from nxd_parity.command import EXIT_DIFFERENT, write_report  # noqa: PLC0415

    from nxd_trainer.parity import compare  # noqa: PLC0415

    case = reports_user_errors(lambda: _case(options, settings))
    with own_threads():
        report = reports_user_errors(
            lambda: compare(
                case,
                dtype=getattr(torch, options.dtype),
                rtol=options.rtol,
                resume_at=options.resume_at,
                reference_device=None if options.device is None else "cpu",
                folder=options.folder,
            )
        )
    if os.environ.get("RANK", "0") == "0":
        if options.hf is not None and report.agrees:
            report.notes.append(_remember(options))
        reports_user_errors(lambda: write_report(report, options))
    leave_mesh()
    return 0 if report.agrees else EXIT_DIFFERENT


def _compare_served(options: argparse.Namespace, settings: list[str]) -> int:
    """Compare a model as it is served, which starts its own workers."""
    given = [*([options.case] if options.case else []), *settings]
    if given or options.hf is not None:
        raise UserError(f"--served compares a model that there is; leave {given[0] if given else '--hf'} out")
    reports_user_errors(lambda: check_own_process(options.nproc, "--served"))
    from nxd_parity.command import write_report  # noqa: PLC0415

    from nxd_trainer.cli.arguments import model_folder  # noqa: PLC0415
    from nxd_trainer.parity.served import compare_served  # noqa: PLC0415

    folder = model_folder(str(options.served))
    report = reports_user_errors(lambda: compare_served(folder, tp_degree=options.nproc or 1, rtol=options.rtol))
    return reports_user_errors(lambda: write_report(report, options))


def _case(options: argparse.Namespace, settings: list[str]) -> "ParityCase":
    from nxd_engine.options import literal  # noqa: PLC0415

    from nxd_trainer.parity import ParityCase  # noqa: PLC0415

    name, steps = options.case, options.compare_steps
    if steps < 1:
        raise ValueError(f"there is nothing to compare in {steps} steps; use 1 or more (--compare-steps)")
    steps += max(options.resume_at, 0)
    if options.hf is not None:
        from nxd_trainer.parity.architecture import case_of_architecture  # noqa: PLC0415

        if name is not None:
            raise ValueError(f"both {name} and --hf {options.hf} are given; pass one of them")
        changes = {key: literal(value) for key, _, value in (setting.partition("=") for setting in settings)}
        return case_of_architecture(options.hf, changes, int(os.environ["WORLD_SIZE"]), steps)
    if name is None or ":" not in name or Path(name).exists():
        from nxd_trainer.training.parity_case import case_of_file  # noqa: PLC0415

        return case_of_file(name, settings, steps)
    if settings:
        raise ValueError(f"{settings[0]} is a recipe key, but {name} is not a recipe; leave it out")
    function = import_named(name)
    if not callable(function):
        raise ValueError(f"{name} is a {type(function).__name__}; pass a function that returns a ParityCase")
    case = function()
    if not isinstance(case, ParityCase):
        raise ValueError(f"{name}() returned a {type(case).__name__}; it must return an nxd_trainer.parity.ParityCase")
    return case


def _remember(options: argparse.Namespace) -> str:
    import torch  # noqa: PLC0415

    from nxd_trainer.parity.architecture import remember_equal  # noqa: PLC0415
    from nxd_trainer.parity.comparison import TOLERANCES  # noqa: PLC0415

    tolerance = TOLERANCES[torch.float64]
    if options.dtype != "float64" or (options.rtol is not None and options.rtol > tolerance):
        return f"The result was not recorded: that needs float64 and a tolerance of {tolerance:g} or less"
    return reports_user_errors(lambda: remember_equal(options.hf))
