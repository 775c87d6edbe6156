"""Finds the command that the first argument names, runs it, and ends the process with its exit code.

Commands are entry points in the group "nxd.commands": functions that take the arguments after the command's name and
return an exit code. The commands of the nxd packages are listed here by name, so that `nxd --help` loads none of them,
and a missing one says what to install.
"""

import argparse
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import NoReturn

from nxd_cli.command import UserError, leave_mesh, reports_user_errors
from nxd_cli.completion import SHELLS, completion_script
from nxd_cli.installation import render_versions, torch_problem
from nxd_cli.launch import end_with_launcher, is_launched, remove_torchrun_folders, slurm_environment
from nxd_cli.output import printable, usable_streams
from nxd_cli.overview import render_overview

GROUP = "nxd.commands"


@dataclass(frozen=True)
class Command:
    """A command of an nxd package: the package that provides it, and a one-line summary."""

    package: str
    summary: str


COMMANDS = {
    "init": Command("nxd-trainer", "write a recipe, from four questions"),
    "train": Command("nxd-trainer", "train a model from a recipe"),
    "data": Command("nxd-trainer", "show what a recipe will train on"),
    "report": Command("nxd-trainer", "write a page about a run, or watch it in the terminal"),
    "run": Command("nxd-cli", "run a training script: torch-xla's, or a trainer's at a layout"),
    "generate": Command("nxd-trainer", "generate text with a model"),
    "serve": Command("nxd-trainer", "answer completion requests with a trained model"),
    "import": Command("nxd-trainer", "convert a Hugging Face folder to a checkpoint"),
    "export": Command("nxd-trainer", "write a Hugging Face folder from a checkpoint"),
    "upcycle": Command("nxd-trainer", "turn a dense Hugging Face folder into a mixture of experts"),
    "ckpt": Command("nxd-ckpt", "inspect, check, compare and convert checkpoints (same as nxd-ckpt)"),
    "plan": Command("nxd-plan", "find the layouts of a training job that fit a cluster"),
    "doctor": Command("nxd-doctor", "find problems of this machine or of a step's graph, and say how to fix them"),
    "parity": Command("nxd-trainer", "check that a layout computes the same as one process"),
    "chaos": Command("nxd-elastic", "kill, stop and slow down ranks of a run, and report what that costs"),
}


def installed_commands() -> dict[str, EntryPoint]:
    """The commands of the installed packages, by name; none of them is loaded."""
    return {found.name: found for found in entry_points(group=GROUP)}


def summaries(installed: dict[str, EntryPoint]) -> dict[str, str]:
    """A summary of each command: first ours, with the package to install if missing, then those of other packages."""
    ours = {
        name: it.summary if name in installed else f"(pip install {it.package}) {it.summary}"
        for name, it in COMMANDS.items()
    }
    others = {
        name: (found.dist.metadata["Summary"] if found.dist else None) or found.value
        for name, found in installed.items()
        if name not in ours
    }
    return ours | others


EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 128 + 2  # as a shell reports a process that Ctrl-C ends
EXIT_NO_READER = 128 + 13  # the exit code of a process that SIGPIPE ends

WITHOUT_TORCH = ("doctor",)  # commands that work without torch, and say what is wrong with it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code: 0, 2 for a user's mistake, 130 after Ctrl-C.

    `nxd train` returns 143 if a signal has stopped it. If the reader of its output has exited, as `head` does, the
    process exits at once with 141.
    """
    with usable_streams():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    name, *rest = arguments or [""]
    try:
        command = _find(name, rest)
        os.environ.update(reports_user_errors(lambda: slurm_environment(os.environ)))
        if is_launched():
            end_with_launcher()
            if name != "run":  # its script may write its errors there
                remove_torchrun_folders()
        code = command(rest)
        sys.stdout.flush()
    except UserError as mistake:
        # Every rank makes the same mistake; one rank per host reports it.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"nxd {name}: {mistake}", file=sys.stderr)
        leave_mesh()
        return EXIT_MISTAKE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich exits with 1 when its reader is gone
            os._exit(EXIT_NO_READER)
        raise
    except KeyboardInterrupt:
        if is_launched() or name == "run":  # a script ends as under `python`, with the line that was interrupted
            raise
        print(f"nxd {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            os._exit(EXIT_NO_READER)
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            print(f"nxd {name}: {_NO_TORCH}", file=sys.stderr)
            return EXIT_MISTAKE
        _fail_at_once(error)
    return code


_NO_TORCH = "torch is not installed: pip install torch (see `nxd doctor`)"


def _find(name: str, arguments: Sequence[str]) -> Callable[[Sequence[str]], int]:
    """Load the command with this name.

    Exits with 0 after what `nxd` itself prints: the overview, `--help`, versions, a completion script.

    Raises:
        UserError: there is no such command, or its package is not installed, or lacks what it needs.
    """
    installed = installed_commands()
    if name in installed:
        return _load(name, installed[name])
    if not name:
        print(printable(render_overview(Path(), summaries(installed), installed)))
        sys.exit(0)
    if name in COMMANDS:
        package = COMMANDS[name].package
        raise UserError(f"needs {package}, which is not installed; pip install {package}")
    if not name.startswith("-"):
        near = get_close_matches(name, installed, 1)
        hint = f"did you mean nxd {near[0]}?" if near else "`nxd --help` lists the commands"
        raise UserError(f"there is no such command; {hint}")
    options = _parser(installed).parse_args([name, *arguments])
    print(reports_user_errors(lambda: completion_script(options.print_completion, installed, summaries(installed))))
    sys.exit(0)


def _parser(installed: dict[str, EntryPoint]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nxd",
        description="Train and serve large models with tensor, pipeline and data parallelism.",
        epilog="examples:\n  nxd\n  nxd init\n  nxd train recipe.toml --nproc 2\n  nxd train --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=render_versions())
    parser.add_argument(
        "--print-completion", choices=SHELLS, metavar="SHELL", help=f"print a completion script: {', '.join(SHELLS)}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for known, summary in summaries(installed).items():
        commands.add_parser(known, help=summary, add_help=False)
    return parser


def _load(name: str, entry: EntryPoint) -> Callable[[Sequence[str]], int]:
    problem = torch_problem()
    if problem and name not in WITHOUT_TORCH:
        raise UserError(problem)
    try:
        command: Callable[[Sequence[str]], int] = entry.load()
    except ModuleNotFoundError as error:
        package = f"; pip install {entry.dist.name} installs it" if entry.dist else ""
        told = _NO_TORCH if error.name == "torch" else f"needs the module {error.name}, which is not installed{package}"
        raise UserError(told) from error
    except (ImportError, OSError) as error:  # a broken installation: a library that is missing or of another version
        raise UserError(f"cannot be loaded: {type(error).__name__}: {error}; see `nxd doctor`") from error
    return command


def _reader_is_gone() -> bool:
    """Whether stdout is what could not be written: a broken pipe may also come from a socket."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _fail_at_once(error: Exception) -> NoReturn:
    """Show the failure, then exit without tearing anything down.

    Peers learn of the failure only when this process is gone, so the cause is printed before its consequences.
    """
    code = 1
    if is_launched():
        from nxd_state import report_failure  # noqa: PLC0415 - it loads torch

        code = report_failure(error)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    os._exit(code)
