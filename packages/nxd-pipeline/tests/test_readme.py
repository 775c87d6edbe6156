"""The README's examples run as written and print what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from nxd_testing import run_torchrun

pytestmark = pytest.mark.smoke

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```console\n(.*?)```)?", README.read_text(), flags=re.DOTALL)
EXAMPLES = [block for block in BLOCKS if "$ torchrun" not in block[1]]
(PIPELINE,) = [block for block in BLOCKS if "$ torchrun" in block[1]]


@pytest.mark.parametrize(("source", "printed"), EXAMPLES)
def test_readme_example_runs_and_prints_as_written(tmp_path, monkeypatch, capsys, source, printed):
    monkeypatch.chdir(tmp_path)

    exec(compile(source, str(README), "exec"), {})

    assert capsys.readouterr().out.strip() == printed.strip()


def test_readme_pipeline_prints_the_same_loss_alone_and_on_two_ranks(tmp_path):
    script = tmp_path / "pipeline.py"
    script.write_text(PIPELINE[0])

    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    ranks = run_torchrun([str(script)], 2)

    # The last lines: gloo of torch 2.9 says hello on stdout.
    printed = [line for line in PIPELINE[1].splitlines() if not line.startswith("$")]
    assert [run.stdout.splitlines()[-1] for run in (alone, ranks)] == printed


def test_readme_has_examples():
    assert len(EXAMPLES) == 2
