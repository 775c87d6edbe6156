"""The site's drawings show what the packages compute today."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "site"))
drawings = pytest.importorskip("parallel_drawings")


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_committed_drawing_is_current(name: str) -> None:
    committed = (drawings.PICTURES / name).read_text(encoding="utf8")

    assert committed == drawings.DRAWINGS[name](), "run python tools/site/parallel_drawings.py"
