"""`--help` of every command ends with examples, whose flags exist."""

import contextlib
import io
import shlex
from collections.abc import Iterator

import pytest
from nxd_ckpt.cli.main import make_parser
from nxd_cli import main
from nxd_cli.completion import parser_of
from nxd_cli.dispatch import COMMANDS, installed_commands

SUBCOMMANDS = next(action for action in make_parser()._actions if action.dest == "command").choices


def help_of(*command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return printed.getvalue()


def examples_in(text: str) -> Iterator[list[str]]:
    for line in text.partition("\nexamples:\n")[2].splitlines():
        assert line.startswith("  nxd"), f"{line!r} is below the examples"
        yield shlex.split(line)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "ckpt"])
def test_help_of_a_command_ends_with_examples_that_parse(name):
    parser = parser_of(installed_commands()[name].load())

    examples = list(examples_in(help_of(name)))

    assert len(examples) >= 2
    for program, command, *arguments in examples:
        assert (program, command) == ("nxd", name)
        settings = [it for it in arguments if "=" in it and not it.startswith("-")]  # keys, which the parser leaves out
        parser.parse_args([it for it in arguments if name != "parity" or it not in settings])


@pytest.mark.parametrize("name", ["", *SUBCOMMANDS])
def test_help_of_nxd_ckpt_ends_with_examples_that_parse(name):
    examples = list(examples_in(help_of("ckpt", *([name] if name else []))))

    assert examples
    for program, *arguments in examples:
        assert program == "nxd-ckpt"
        assert arguments[0] == name or not name
        make_parser().parse_args(arguments)
