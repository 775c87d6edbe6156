"""The README's examples run as written and print what the README says."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```(?:\n\n```console\n(.*?)```)?", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(("source", "printed"), EXAMPLES)
def test_readme_example_runs_and_prints_as_written(tmp_path, monkeypatch, capsys, source, printed):
    monkeypatch.chdir(tmp_path)

    exec(compile(source, str(README), "exec"), {})

    assert capsys.readouterr().out.strip() == printed.strip()


def test_readme_has_examples():
    assert len(EXAMPLES) == 2
