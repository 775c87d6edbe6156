"""Makes the scripts by which a shell completes the commands of `nxd`, their flags and recipe keys, with shtab."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

SHELLS = ("bash", "zsh", "fish")


def completion_script(shell: str, commands: Mapping[str, EntryPoint], summaries: Mapping[str, str]) -> str:
    """Return a script for one of `SHELLS` that completes these commands.

    Raises:
        ValueError: shtab is not installed.
    """
    try:
        import shtab  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ValueError("--print-completion needs shtab, which is not installed: pip install shtab") from error
    root = argparse.ArgumentParser(prog="nxd")
    root.add_argument("--version", action="store_true", help="versions of the installed packages")
    added = root.add_subparsers(dest="command")
    for name, entry in commands.items():
        parser = parser_of(entry.load())
        _complete_paths(parser, shtab.FILE)
        added.add_parser(name, help=summaries[name], parents=[parser], add_help=False)
    script: str = shtab.complete(root, shell=shell)
    return script


def parser_of(command: Callable[[Sequence[str]], int]) -> argparse.ArgumentParser:
    """Return the parser of a command, which is the first one that the command calls."""
    parse_known_args = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = _raise_parser  # type: ignore[method-assign, assignment]
    try:
        command([])
    except _ParserFound as found:
        return found.parser
    finally:
        argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    raise ValueError(f"{command} does not parse its arguments with argparse")


class _ParserFound(BaseException):
    """Leaves a command that is about to parse its arguments."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def _raise_parser(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
    raise _ParserFound(parser)


def _complete_paths(parser: argparse.ArgumentParser, as_file: Any) -> None:
    """Complete file names wherever a value may be one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_paths(inner, as_file)
        elif action.nargs != 0 and action.choices is None:
            action.complete = as_file  # type: ignore[attr-defined]
