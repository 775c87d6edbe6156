"""Code that the commands share: errors of the user, the number of ranks, a run's checkpoints."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

from nxd_trainer.launch import is_launched, launch_ranks

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

T = TypeVar("T")


class UserError(Exception):
    """An error that the user can correct: shown as one line, without a traceback."""


def reports_user_errors(call: Callable[[], T]) -> T:
    """Call something whose errors are for the user to correct, and the same on every rank."""
    try:
        return call()
    except (ValueError, OSError, FloatingPointError) as error:
        raise UserError(str(error)) from error
    except Exception as error:
        from nxd_ckpt import CheckpointError  # noqa: PLC0415 - it loads torch, which `nxd doctor` may find broken

        if isinstance(error, CheckpointError):
            raise UserError(str(error)) from error
        raise


def started_ranks(options: argparse.Namespace) -> int | None:
    """Start the ranks that `--nproc` asks for and give their exit code; None in a rank, or where none were asked for.

    `options.arguments` is the whole command line, which every rank gets again.
    """
    if options.nproc is None or is_launched():
        return None
    reports_user_errors(lambda: check_nproc(options.nproc))
    return launch_ranks(options.nproc, [sys.executable, "-m", "nxd_trainer", *options.arguments])


def check_nproc(nproc: int) -> None:
    """Raise ValueError for a number of ranks that cannot be started."""
    if nproc < 1:
        raise ValueError(f"--nproc {nproc} must be 1 or more")


def check_own_process(nproc: int | None, command: str) -> None:
    """Raise ValueError where a command that starts its own workers runs in several ranks, or with none."""
    if is_launched():
        raise ValueError(
            f"{command} starts its own worker processes; give --nproc instead of starting it with torchrun"
        )
    if nproc is not None:
        check_nproc(nproc)


def leave_mesh() -> None:
    """End the process groups, if there are any: their threads must not be alive when the interpreter ends."""
    from nxd_state import destroy_model_parallel  # noqa: PLC0415

    destroy_model_parallel()


def model_folder(text: str) -> Path:
    """The folder that was named; of a run's, the one with its checkpoints."""
    folder = Path(text)
    checkpoints = folder / "checkpoints"
    # Not Path's own methods, which raise for what no file can be called.
    is_run = os.path.isfile(folder / "recipe.toml") and os.path.isdir(checkpoints)
    return checkpoints if is_run else folder


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a checkpoint."""
    parser.add_argument("checkpoints", type=model_folder, help="folder of a run, or of its checkpoints")
    parser.add_argument("--tag", help="which checkpoint; the newest if unset")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model to write text with."""
    parser.add_argument(
        "model",
        type=model_folder,
        help="a Hugging Face folder (config.json, safetensors, tokenizer), or that of a run or of its checkpoints",
    )
    parser.add_argument("--tag", help="which checkpoint; the newest if unset")
    parser.add_argument(
        "--adapter",
        type=model_folder,
        metavar="FOLDER",
        help="a LoRA adapter of PEFT's files or in a checkpoint, to merge",
    )
    add_tokenizer(parser)


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a draft model."""
    parser.add_argument(
        "--draft",
        type=model_folder,
        metavar="MODEL",
        help="a smaller model of the same tokenizer, which guesses tokens: the same texts, sooner at temperature 0",
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=4, metavar="N", help="guesses at a time (default: %(default)s)"
    )


def add_compiled_degrees(parser: argparse.ArgumentParser) -> None:
    """Add `--context-parallel-size` and `--expert-parallel-size`, of compiled models."""
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="groups of worker processes, each with the whole model, that read a prompt together (default: 1)",
    )
    parser.add_argument(
        "--expert-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="worker processes, of those that there are, that a model's experts are divided among (default: 1)",
    )


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add `--tokenizer`, for checkpoints that do not say theirs."""
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json, its folder, or 'bytes'; unset: what the model says"
    )


def add_nproc(parser: argparse.ArgumentParser, *more_names: str) -> None:
    """Add `--nproc`, which `started_ranks` obeys."""
    parser.add_argument(
        "--nproc",
        *more_names,
        type=int,
        metavar="N",
        help="start N ranks on this machine; unset: this process, or torchrun's ranks",
    )
