"""The README's code runs and prints what it shows."""

from pathlib import Path

import pytest
from nxd_testing import deadline
from pages import run_page

pytestmark = pytest.mark.smoke


def test_readme_runs_and_prints_what_it_shows(tmp_path):
    run_page(Path(__file__).parents[1] / "README.md", tmp_path, timeout=deadline(300))
