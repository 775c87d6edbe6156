"""The README's Python blocks run as written, and so do its `nxd` commands."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from nxd_testing import deadline
from nxd_trainer.recipe import recipe_from_dict

pytestmark = pytest.mark.smoke

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```(python|console|toml)\n(.*?)```", README.read_text(), flags=re.DOTALL)
EXAMPLES = [source for language, source in BLOCKS if language == "python"]
RECIPES = [source for language, source in BLOCKS if language == "toml"]
COMMANDS = [line for language, block in BLOCKS if language == "console" for line in block.splitlines()]


def run(arguments: list[str], folder: Path) -> None:
    result = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=deadline(300), check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("source", EXAMPLES)
def test_readme_example_runs_as_written(tmp_path, source):
    run([sys.executable, "-c", source], tmp_path)


def test_readme_commands_run_as_written(tmp_path):
    for line in COMMANDS:
        prompt, program, *arguments = shlex.split(line)
        assert (prompt, program) == ("$", "nxd")
        run([sys.executable, "-m", "nxd_cli", *arguments], tmp_path)


@pytest.mark.parametrize("source", RECIPES)
def test_readme_recipe_is_one(source):
    recipe_from_dict(tomllib.loads(source))
