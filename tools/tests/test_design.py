"""docs/explanation/design.md points at what there is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:nxd_\w+|tools|packages)/[\w/.]*)[`:]", TEXT)))
NAMES = sorted(set(re.findall(r"`(nxd_\w+/[\w/]+\.py):([\w.]+)`", TEXT)))


def located(path: str) -> Path:
    if not path.startswith("nxd_"):
        return ROOT / path
    return ROOT / "packages" / path.partition("/")[0].replace("_", "-") / "src" / path


def names_in(file: Path) -> set[str]:
    """Functions, classes and their methods."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_files_of_the_map_exist() -> None:
    assert len(FILES) > 40
    assert [path for path in FILES if not located(path).exists()] == []


def test_names_of_the_map_are_in_their_files() -> None:
    assert len(NAMES) > 40
    assert [f"{path}:{name}" for path, name in NAMES if name not in names_in(located(path))] == []
