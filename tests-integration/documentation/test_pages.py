"""Every code block and command of the site's pages runs, and prints what its page shows."""

from pathlib import Path

import pytest
from nxd_testing import deadline
from pages import blocks_of, is_slow, run_page

ROOT = Path(__file__).parents[2]
PAGES = [path for path in sorted(ROOT.glob("docs/**/*.md")) if blocks_of(path.read_text(encoding="utf8"))]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            path,
            id=str(path.relative_to(ROOT / "docs")),
            marks=[pytest.mark.slow] if is_slow(path.read_text(encoding="utf8")) else [],
        )
        for path in PAGES
    ],
)
def test_page_runs_and_prints_what_it_shows(page, tmp_path):
    run_page(page, tmp_path, timeout=deadline(300))
