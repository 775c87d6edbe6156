"""Parses the command line, runs the command that it names, and ends the process with its exit code."""

import argparse
import os
import re
import select
import sys
import traceback
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from nxd_trainer.cli import (
    chaos,
    ckpt,
    data,
    doctor,
    export,
    generate,
    import_hugging_face,
    parity,
    plan,
    run,
    serve,
    train,
    upcycle,
)
from nxd_trainer.cli.command import UserError, leave_mesh, reports_user_errors
from nxd_trainer.cli.output import usable_streams
from nxd_trainer.launch import end_with_launcher, is_launched, remove_torchrun_folders, slurm_environment
from nxd_trainer.logs import log_level
from nxd_trainer.recipe import recipe_keys

EXIT_MISTAKE = 2
_TRUE_OR_FALSE = ("true", "false", "0", "1")
EXIT_NO_READER = 128 + 13  # as of a process that SIGPIPE ends
COMMANDS = (
    train,
    data,
    run,
    generate,
    serve,
    import_hugging_face,
    export,
    upcycle,
    ckpt,
    plan,
    doctor,
    parity,
    chaos,
)
RECIPE_FLAGS = {"train": train.FLAGS, "data": data.FLAGS, "parity": parity.FLAGS}  # not a key of the recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code: 0, 2 for a user's mistake, 143 after a signal.

    Where the reader of its output has gone, such as `head`, the process ends at once, with 141.
    """
    with usable_streams():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> int:
    remaining, settings = _take_apart(arguments)
    options = _parse(remaining, argparse.Namespace(arguments=arguments, settings=settings))
    try:
        reports_user_errors(log_level)
        os.environ.update(reports_user_errors(lambda: slurm_environment(os.environ)))
        if is_launched():
            end_with_launcher()
            if options.command != "run":  # whose script may write its errors there
                remove_torchrun_folders()
        code: int = options.run(options)
        sys.stdout.flush()
    except UserError as mistake:
        # Every rank makes the same mistake; one rank of each host says so.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"nxd {options.command}: {mistake}", file=sys.stderr)
        leave_mesh()
        return EXIT_MISTAKE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends so, with 1, where its reader has gone
            os._exit(EXIT_NO_READER)
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            os._exit(EXIT_NO_READER)
        _fail_at_once(error)
    return code


def _parse(arguments: list[str], options: argparse.Namespace) -> argparse.Namespace:
    """The options of the command; ends the process at a mistake, with the nearest flag for an unknown one."""
    parser = argparse.ArgumentParser(
        prog="nxd", description="Train and serve large models with tensor, pipeline and data parallelism."
    )
    parser.add_argument("--version", action="version", version=f"nxd {_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    options, unknown = parser.parse_known_args(arguments, options)
    if unknown:
        command_parser = commands.choices[options.command]
        flags = re.findall(r"--[a-z][a-z-]+", command_parser.format_help())
        near = get_close_matches(unknown[0].partition("=")[0], flags, 1)
        hint = f"did you mean {near[0]}?" if near else f"`nxd {options.command} --help` lists what there is"
        command_parser.error(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
    return options


def _version() -> str:
    try:
        return version("nxd-trainer")
    except PackageNotFoundError:
        return "of a source tree that is not installed"


def _take_apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What the parser is to read, and the settings of a recipe."""
    command = arguments[0] if arguments else ""
    if command in RECIPE_FLAGS:
        return _take_settings(arguments, RECIPE_FLAGS[command])
    return (arguments[:1] if command == "ckpt" else arguments), []  # nxd-ckpt has a parser of its own


def _take_settings(arguments: list[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """The arguments without the recipe's keys, and those keys as `key=value`.

    A key may come as `--train.steps 100`, `--train.steps=100` or `train.steps=100`, and one that is true or false also
    as `--data.chat`. What is no key is taken along: the recipe knows best which one was meant.
    """
    switches = {name for name, key in recipe_keys().items() if key.value_type is bool}
    remaining: list[str] = []
    settings: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name in flags and not equals and name != "help" and waiting:
            remaining += [argument, waiting.pop()]  # its value may look like a setting, as a layout does
        elif argument.startswith("--") and name not in flags:
            if name in switches and not equals and (not waiting or waiting[-1].lower() not in _TRUE_OR_FALSE):
                value = "true"
            elif not equals and waiting and not waiting[-1].startswith("--"):
                value = waiting.pop()
            settings.append(f"{name}={value}")
        elif equals and not argument.startswith("-") and not os.path.exists(argument):
            settings.append(argument)
        else:
            remaining.append(argument)
    return remaining, settings


def _reader_is_gone() -> bool:
    """Whether it was this process's output that could not be written; sockets have readers as well."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _fail_at_once(error: Exception) -> NoReturn:
    """Show the failure, then end without tearing anything down.

    Peers learn of the failure only when this process is gone, so the cause is printed before what follows from it.
    """
    code = 1
    if is_launched():
        from nxd_state import report_failure  # noqa: PLC0415 - it loads torch

        code = report_failure(error)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    os._exit(code)
