"""The README's program prints what its comment says."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

README = (Path(__file__).parents[1] / "README.md").read_text()
[EXAMPLE] = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_example_prints_the_names_in_its_comment(capsys):
    exec(EXAMPLE, {})

    assert f"# {capsys.readouterr().out.strip()}" in EXAMPLE.splitlines()
