"""The drawings in docs/pictures are those that the code makes, and every page's picture exists."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools/site"))
from drawings import PICTURES, drawings  # noqa: E402


@pytest.mark.parametrize("name", drawings())
def test_committed_drawing_is_current(name: str) -> None:
    picture = drawings()[name]

    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert (PICTURES / name).read_text(encoding="utf8") == picture, "run python tools/site/drawings.py"


def test_pictures_of_pages_exist() -> None:
    for page in ROOT.glob("docs/**/*.md"):
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf8")):
            assert (page.parent / link).is_file(), f"{page.name} shows {link}"
