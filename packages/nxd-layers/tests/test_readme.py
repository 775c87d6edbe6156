"""The README's examples run as written, alone and under torchrun, and print what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from nxd_testing import run_torchrun

pytestmark = pytest.mark.smoke

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLE, CONTEXT_EXAMPLE, QUANTIZED_EXAMPLE = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
(CONSOLE,) = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
PRINTED = re.findall(r"^\$ .*\n(.*)\n", CONSOLE, flags=re.MULTILINE)


def test_example_prints_the_same_loss_alone_and_under_torchrun(tmp_path):
    script = tmp_path / "block.py"
    script.write_text(EXAMPLE)

    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    ranks = run_torchrun([str(script)], 2)

    assert alone.returncode == 0, alone.stderr
    assert ranks.returncode == 0, ranks.stderr
    # The last lines: gloo of torch 2.9 says hello on stdout.
    assert [run.stdout.splitlines()[-1] for run in (alone, ranks)] == PRINTED


def test_context_example_prints_the_shape_in_its_comment(capsys):
    exec(CONTEXT_EXAMPLE, {})

    assert f"# {capsys.readouterr().out.strip()}" in CONTEXT_EXAMPLE.splitlines()


def test_quantized_example_runs_as_written():
    exec(QUANTIZED_EXAMPLE, {})
