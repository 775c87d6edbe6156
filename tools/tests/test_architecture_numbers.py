"""Pages and READMEs name the numbers of architectures that docs/reference/hf-support.md has."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/reference/hf-support.md").read_text(encoding="utf8")
SENTENCE = re.compile(r"(\d+)\s+of\s+(?:the\s+)?(\d+)\s+(?:Hugging Face\s+)?(?:transformers\s+)?architectures")
PAGES = [path for glob in ("*.md", "docs/**/*.md", "packages/*/README.md") for path in sorted(ROOT.glob(glob))]


@pytest.mark.parametrize(
    ("path", "numbers"),
    [
        pytest.param(path, match.groups(), id=str(path.relative_to(ROOT)))
        for path in PAGES
        for match in SENTENCE.finditer(path.read_text(encoding="utf8"))
    ],
)
def test_page_names_the_numbers_of_the_table(path: Path, numbers: tuple[str, str]) -> None:
    [(tried, passed)] = re.findall(r"Tried: (\d+) architectures .* Passed: (\d+) at TP 2,", TABLE)

    assert numbers == (passed, tried)
