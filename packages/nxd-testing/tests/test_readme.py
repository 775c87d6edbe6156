"""The README's programs, run as they stand there, print what it says they print."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nxd_testing import run_on_ranks

pytestmark = pytest.mark.smoke

README = (Path(__file__).parents[1] / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
CONSOLES = dict(re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path):
    """A folder with the programs."""
    for program in PROGRAMS:
        (tmp_path / re.match(r"# (\S+\.py)\n", program)[1]).write_text(program)
    return tmp_path


def test_test_of_the_readme_passes(folder):
    readme_test = runpy.run_path(str(folder / "test_sum.py"))

    readme_test["test_sum_on_two_ranks"](run_on_ranks)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the stand-in needs torch 2.13")
def test_program_on_the_stand_in_for_neuron_prints_what_the_readme_says(folder):
    output = CONSOLES["python on_neuron.py"]

    result = subprocess.run(
        [sys.executable, str(folder / "on_neuron.py")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert result.stdout == output, result.stderr
