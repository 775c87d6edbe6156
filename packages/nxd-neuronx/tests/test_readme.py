"""The README's Python blocks run as written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from nxd_testing import deadline

pytestmark = pytest.mark.smoke

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", EXAMPLES)
def test_readme_example_runs_as_written(tmp_path, source):
    result = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=deadline(300),
        check=False,
    )

    assert result.returncode == 0, result.stderr
