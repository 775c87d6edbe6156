"""Helpers that commands share: user errors, arguments, the keys of a recipe, and the number of ranks."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from nxd_cli.launch import is_launched, launch_ranks

T = TypeVar("T")


class UserError(Exception):
    """An error that the user can fix: shown as one line, without a traceback."""


def reports_user_errors(call: Callable[[], T]) -> T:
    """Call a function whose errors the user can fix and that are the same on every rank.

    These errors are ValueError, OSError, FloatingPointError, and classes with a true `user_can_mend` attribute.
    """
    try:
        return call()
    except Exception as error:
        if isinstance(error, (ValueError, OSError, FloatingPointError)) or getattr(error, "user_can_mend", False):
            raise UserError(str(error)) from error
        raise


class _HelpFormatter(argparse.HelpFormatter):
    """Fills each line of a description or epilog by itself, and keeps indented lines, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill, lines = super()._fill_text, text.split("\n")
        return "\n".join(line if line[:1] in ("", " ") else fill(line, width, indent) for line in lines)


def make_parser(
    name: str, description: str, *, examples: Sequence[str], usage: str | None = None, exit_codes: str = ""
) -> argparse.ArgumentParser:
    """Make the parser of a command, whose `--help` ends with examples.

    Args:
        name: the command's name, such as "train".
        description: what the command does.
        examples: whole command lines, such as "nxd train recipe.toml".
        usage: the usage line; unset: made from the arguments.
        exit_codes: the meanings of exit codes other than those of every command.
    """
    told = [*([f"exit codes: {exit_codes}", ""] if exit_codes else []), "examples:", *(f"  {it}" for it in examples)]
    return argparse.ArgumentParser(
        prog=f"nxd {name}",
        usage=usage,
        description=description,
        epilog="\n".join(told),
        formatter_class=_HelpFormatter,
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command's options; a mistake ends the process, and an unknown flag gets the nearest one as a hint."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = re.findall(r"--[a-z][a-z-]+", parser.format_help())
        near = get_close_matches(unknown[0].partition("=")[0], flags, 1)
        hint = f"did you mean {near[0]}?" if near else f"`{parser.prog} --help` lists the flags"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
    return options


def started_ranks(nproc: int | None, command: str, arguments: Sequence[str]) -> int | None:
    """Start the ranks that `--nproc` asks for, each with the same command line, and return their exit code.

    Returns None in a rank, or if `--nproc` was not given.
    """
    if nproc is None or is_launched():
        return None
    reports_user_errors(lambda: check_nproc(nproc))
    return launch_ranks(nproc, [sys.executable, "-m", "nxd_cli", command, *arguments])


def check_nproc(nproc: int) -> None:
    """Raise ValueError if this many ranks cannot be started."""
    if nproc < 1:
        raise ValueError(f"--nproc {nproc} must be 1 or more")


def check_own_process(nproc: int | None, command: str) -> None:
    """Raise ValueError if a command that starts its own workers runs under a launcher, or with a bad `--nproc`."""
    if is_launched():
        raise ValueError(
            f"{command} starts its own worker processes; give --nproc instead of starting it with torchrun"
        )
    if nproc is not None:
        check_nproc(nproc)


def leave_mesh() -> None:
    """Destroy the process groups, if there are any: their threads must not be alive when the interpreter exits."""
    if "nxd_state" in sys.modules:
        from nxd_state import destroy_model_parallel  # noqa: PLC0415

        destroy_model_parallel()


def add_nproc(parser: argparse.ArgumentParser, *more_names: str) -> None:
    """Add `--nproc`, the flag that `started_ranks` reads."""
    parser.add_argument(
        "--nproc",
        *more_names,
        type=int,
        metavar="N",
        help="start N ranks on this machine; if unset, this process or torchrun's ranks",
    )


def import_named(name: str, key: str = "") -> Any:
    """Import the object that "module:name" names; modules are also looked up in the working directory.

    This runs the module, so the name must come from the person at the command line, never from a checkpoint or
    another untrusted source.

    Args:
        name: the object's name, such as "my_models:make".
        key: the key it was given under, such as "model.factory"; for messages.
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python does for a script
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the module raises
        told = f"{key}={name}" if key else name
        raise ValueError(f"{told} cannot be imported from here: {type(error).__name__}: {error}") from error


_TRUE_OR_FALSE = ("true", "false", "0", "1")


def _is_almost(name: str, flags: Collection[str]) -> bool:
    return bool(get_close_matches(name, flags, 1, cutoff=0.7))


def take_settings(
    arguments: Sequence[str],
    flags: Collection[str],
    switches: Collection[str] = (),
    without_value: Collection[str] = ("help",),
) -> tuple[list[str], list[str]]:
    """Split the arguments into those without the recipe's keys, and these keys as `key=value`.

    A key may be given as `--train.steps 100`, `--train.steps=100` or `train.steps=100`, and a boolean one also as
    `--data.chat`. Unknown keys are kept, because the recipe knows best which key was meant; those spelled almost like a
    flag stay with the arguments, for `parse` to name that flag.
    """
    remaining: list[str] = []
    settings: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name in flags and not equals and name not in without_value and waiting:
            remaining += [argument, waiting.pop()]  # its value may look like a setting, as a layout does
        elif argument.startswith("--") and "." not in name and name not in flags and _is_almost(name, flags):
            remaining.append(argument)
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
