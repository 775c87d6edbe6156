"""The top-level README cannot rot: its code runs, its sessions, packages and files exist."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from nxd_testing import deadline

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL)


def blocks(language: str) -> list[str]:
    return [block for name, block in BLOCKS if name == language]


def nox_sessions() -> set[str]:
    """Names of the functions in the noxfile that are sessions."""
    module = ast.parse((ROOT / "noxfile.py").read_text())
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


def run(arguments: list[str], folder: Path) -> None:
    result = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=deadline(300), check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("source", blocks("python"))
def test_python_block_runs_as_written(tmp_path, source):
    run([sys.executable, "-c", source], tmp_path)


def test_console_commands_run_as_written(tmp_path):
    lines = [line for block in blocks("console") for line in block.splitlines()]

    for line in lines:
        prompt, program, *arguments = shlex.split(line)
        assert (prompt, program) == ("$", "nxd")
        run([sys.executable, "-m", "nxd_cli", *arguments], tmp_path)


def test_shell_commands_name_sessions_and_packages_that_exist():
    lines = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    commands = [words for words in lines if words]

    assert ["pip", "install", "nox", "uv"] in commands
    for words in commands:
        if words[:2] == ["nox", "-s"]:
            assert words[2] in nox_sessions()


def test_every_session_package_and_file_that_the_text_names_exists():
    sessions = {name.strip('"').partition("(")[0] for name in re.findall(r"`nox -s ([^`]+)`", TEXT)}
    packages = set(re.findall(r"nxd-[a-z]+", TEXT))
    files = re.findall(r"\]\(([^)#:]+)\)", TEXT)

    assert sessions <= nox_sessions()
    assert packages == {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert [file for file in files if not (ROOT / file).exists()] == []
