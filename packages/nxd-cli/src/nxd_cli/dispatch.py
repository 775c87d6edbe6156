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
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import NoReturn

from nxd_cli.command import UserError, leave_mesh, reports_user_errors
from nxd_cli.launch import end_with_launcher, is_launched, remove_torchrun_folders, slurm_environment
from nxd_cli.output import usable_streams

GROUP = "nxd.commands"


@dataclass(frozen=True)
class Command:
    """A command of an nxd package: the package that provides it, and a one-line summary."""

    package: str
    summary: str


COMMANDS = {
    "train": Command("nxd-trainer", "train a model from a recipe"),
    "data": Command("nxd-trainer", "show what a recipe will train on"),
    "report": Command("nxd-trainer", "write a page about a run, or watch it in the terminal"),
    "run": Command("nxd-neuronx", "run a training script, including one written for torch-xla"),
    "generate": Command("nxd-trainer", "generate text with a model"),
    "serve": Command("nxd-trainer", "answer completion requests with a trained model"),
    "import": Command("nxd-trainer", "convert a Hugging Face folder to a checkpoint"),
    "export": Command("nxd-trainer", "write a Hugging Face folder from a checkpoint"),
    "upcycle": Command("nxd-trainer", "turn a dense Hugging Face folder into a mixture of experts"),
    "ckpt": Command("nxd-ckpt", "inspect, check, compare and convert checkpoints (same as nxd-ckpt)"),
    "plan": Command("nxd-plan", "find the layouts of a training job that fit a cluster"),
    "doctor": Command("nxd-doctor", "find problems of this machine or of a step's graph, and say how to fix them"),
    "parity": Command("nxd-parity", "check that a layout computes the same as one process"),
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


EXIT_NO_READER = 128 + 13  # the exit code of a process that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code: 0, 2 for a user's mistake, 143 after a signal.

    If the reader of its output has exited, as `head` does, the process exits at once with 141.
    """
    with usable_streams():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    name, *rest = arguments or [""]
    command = _find(name)
    try:
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
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            os._exit(EXIT_NO_READER)
        _fail_at_once(error)
    return code


def _find(name: str) -> Callable[[Sequence[str]], int]:
    """Load the command with this name; exits with 2 if there is none, and with 0 after `--help`."""
    installed = installed_commands()
    if name not in installed:
        parser = argparse.ArgumentParser(
            prog="nxd", description="Train and serve large models with tensor, pipeline and data parallelism."
        )
        parser.add_argument("--version", action="version", version=f"nxd {_version()}")
        commands = parser.add_subparsers(dest="command", required=True)
        for known, summary in summaries(installed).items():
            commands.add_parser(known, help=summary, add_help=False)
        parser.parse_args([name] if name else [])
        package = COMMANDS[name].package
        parser.exit(EXIT_MISTAKE, f"nxd {name}: needs {package}, which is not installed; pip install {package}\n")
    command: Callable[[Sequence[str]], int] = installed[name].load()
    return command


def _version() -> str:
    try:
        return version("nxd-cli")
    except PackageNotFoundError:
        return "(source tree that is not installed)"


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
