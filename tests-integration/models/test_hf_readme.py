"""The READMEs' examples with models of transformers run as written, and print what is written below them."""

import re
from pathlib import Path

import pytest
from nxd_testing import run_torchrun

pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("readme", "ranks"),
    [pytest.param("README.md", 4, marks=pytest.mark.slow)],
)
def test_example_prints_what_is_written(tmp_path, readme, ranks):
    ((source, printed),) = re.findall(
        r"```py\n(.*?)```\n\n```text\n(.*?)```", (ROOT / readme).read_text(), flags=re.DOTALL
    )
    script = tmp_path / "model.py"
    script.write_text(source)

    result = run_torchrun([str(script)], ranks)

    assert result.returncode == 0, result.stderr
    lines = printed.splitlines()[1:]
    assert [line for line in result.stdout.splitlines() if line in lines] == lines
