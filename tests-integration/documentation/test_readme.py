"""The README's commands run, and what it names exists."""

import ast
import re
from pathlib import Path

from nxd_testing import deadline
from pages import run_page

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def nox_sessions() -> set[str]:
    """Names of the functions in the noxfile that are sessions."""
    module = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf8"))
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


def test_readme_runs_and_prints_what_it_shows(tmp_path):
    run_page(README, tmp_path, timeout=deadline(300))


def test_every_session_package_and_file_that_the_readme_names_exists():
    text = README.read_text(encoding="utf8")
    sessions = {name.strip('"').partition("(")[0] for name in re.findall(r'nox -s ([a-z]+|"[^"]+")', text)}
    packages = set(re.findall(r"nxd-[a-z]+(?:-[a-z]+)*", text))
    files = re.findall(r"\]\(([^)#:]+)", text)

    assert {"demo", "tests", "docs"} <= sessions <= nox_sessions()
    assert packages == {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert [file for file in files if not (ROOT / file).exists()] == []
