"""What `nxd` without arguments says: the machine, the packages, the commands, and the command to type next."""

import json
import os
import platform
import re
import shlex
import shutil
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from nxd_cli.installation import describe_devices, installed_versions, own_packages, torch_problem

SECTIONS = {"model", "parallel", "data", "train"}  # of a recipe
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
_MOST_FILES = 50  # looked at in a folder


def render_overview(folder: Path, commands: Mapping[str, str], installed: Mapping[str, object]) -> str:
    """Return what can be done in a folder.

    Args:
        folder: the working directory.
        commands: the summary of each command.
        installed: the commands that are installed.
    """
    torch, problem = installed_versions(["torch"]).get("torch"), torch_problem()
    lines = [
        f"torch {torch or 'is not installed'}, Python {platform.python_version()}",
        describe_devices(),
        *(_filled(f"{', '.join(names)} {version}") for version, names in _packages_by_version()),
        *([problem] if problem else []),
        "",
        "commands:",
        *(_row(name, summary) for name, summary in commands.items()),
        "",
        "next:",
    ]
    following = [it for it in next_commands(folder) if it[0].split()[1] in installed]
    wide = max(len(command) for command, _ in [*following, _HELP])
    return "\n".join([*lines, *(_row(command, meaning, wide) for command, meaning in [*following, _HELP])])


_HELP = ("nxd COMMAND --help", "the arguments of a command, with examples")


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """The commands that make sense in a folder, with what each does: for its newest run, its recipes, or neither."""
    commands = []
    run = max(_runs_below(folder), key=_last_change, default=None)
    if run is not None:
        (step, steps), shown = _progress(run), shlex.quote(str(run.relative_to(folder)))
        recipe_of_run = _read(run / "recipe.toml")
        if step < steps:
            file = shlex.quote(str((run / "recipe.toml").relative_to(folder)))
            meaning = f"resume the run in {shown}, at step {step} of {steps}"
            commands.append((f"nxd train {file}{ranks_of_last_start(run) or _ranks(recipe_of_run)}", meaning))
        else:
            chat = " --chat" if _section(recipe_of_run, "data").get("chat") is True else ""
            commands.append((f"nxd generate {shown}{chat}", f"generate text with the model of {shown}"))
        commands.append((f"nxd report {shown}", "write a page about the run"))
    recipe = next(_recipes_in(folder), None)
    if recipe is not None:
        name = shlex.quote(recipe.name)
        commands.append((f"nxd data {name}", "show the data of the recipe"))
        commands.append((f"nxd train {name}{_ranks_in_head(recipe) or _ranks(_read(recipe))}", "train"))
    else:
        commands.append(("nxd init", "write a recipe, from four questions"))
    return [*commands, ("nxd doctor", "check this machine")]


def ranks_of_last_start(run: Path) -> str:
    """Return the flag that started the ranks of a run last, such as " --nproc 4".

    It is empty if that is not known, or nxd did not start them.
    """
    try:
        lines = (run / "events.jsonl").read_bytes().splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        try:
            event = json.loads(line)
            if event["event"] == "start":
                environment = event["environment"]
                return f" --nproc {int(environment['ranks'])}" if environment["launcher"] == "nxd --nproc" else ""
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # half a line, or not the trainer's
            continue
    return ""


def _recipes_in(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.glob("*.toml"))[:_MOST_FILES]:
        if _read(file).keys() & SECTIONS:
            yield file


def _runs_below(folder: Path) -> list[Path]:
    """The output folders of `nxd train` in a folder, or in its folder `runs`."""
    inside = [*folder.glob("*/metrics.jsonl"), *folder.glob("runs/*/metrics.jsonl")]
    return [path.parent for path in inside if (path.parent / "recipe.toml").is_file()]


def _last_change(run: Path) -> float:
    return (run / "metrics.jsonl").stat().st_mtime


def _progress(run: Path) -> tuple[int, int]:
    """The last logged step of a run, and the steps that its recipe asks for."""
    steps = _section(_read(run / "recipe.toml"), "train").get("steps")
    with (run / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        lines = file.read().splitlines()
    logged = (_step_in(line) for line in reversed(lines))
    return next((step for step in logged if step is not None), 0), steps if isinstance(steps, int) else 0


def _step_in(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # a line that is only half written
        return None


def _ranks(recipe: Mapping[str, Any]) -> str:
    """The flag that starts the ranks which one replica of a recipe's model needs."""
    sizes = [_section(recipe, "parallel").get(name, 1) for name in _SIZES]
    nproc = prod(it if isinstance(it, int) else 1 for it in sizes)
    return f" --nproc {nproc}" if nproc > 1 else ""


def _ranks_in_head(recipe: Path) -> str:
    """The flag in the command that `nxd init` writes above a recipe; empty if there is none."""
    first_line = recipe.read_text(encoding="utf-8").partition("\n")[0]
    found = re.fullmatch(r"# nxd train .*( --nproc [1-9]\d*)", first_line)
    return found[1] if found else ""


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = recipe.get(name)
    return section if isinstance(section, dict) else {}


def _read(recipe: Path) -> dict[str, Any]:
    """The content of a TOML file; empty if it is not one, because it may be anybody's."""
    try:
        return tomllib.loads(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def _packages_by_version() -> Iterator[tuple[str, list[str]]]:
    versions = installed_versions(own_packages())
    by_version = sorted(versions, key=lambda name: (versions[name], name))
    for version, names in groupby(by_version, key=versions.__getitem__):
        yield version, list(names)


def _filled(text: str) -> str:
    width = shutil.get_terminal_size().columns - 2
    return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _row(name: str, meaning: str, wide: int = 10) -> str:
    return f"  {name:{wide}}  {meaning}"
