"""The README's example runs as written, and prints what the README says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

README = (Path(__file__).parents[1] / "README.md").read_text()
((EXAMPLE, PRINTED),) = re.findall(r"```python\n(.*?)```\n\n```console\n(.*?)```", README, flags=re.DOTALL)


def test_example_prints_what_the_readme_says(tmp_path):
    (tmp_path / "mlp.py").write_text(EXAMPLE)

    result = subprocess.run(
        [sys.executable, "mlp.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )

    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith("[Gloo] ")) == PRINTED  # gloo of torch 2.9 says hello
