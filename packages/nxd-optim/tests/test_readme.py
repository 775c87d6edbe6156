"""The README's examples run as written, alone and under torchrun, and print what the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from nxd_testing import run_torchrun

pytestmark = pytest.mark.smoke

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
PRINTED = re.findall(r"^\$ .*\n(.*)\n\$ .*\n(.*)\n", README, flags=re.MULTILINE)


@pytest.mark.parametrize(("example", "printed"), list(zip(EXAMPLES, PRINTED, strict=True)), ids=["reducer", "zero1"])
def test_example_prints_the_same_alone_and_under_torchrun(tmp_path, example, printed):
    script = tmp_path / "train.py"
    script.write_text(example)

    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    replicas = run_torchrun([str(script)], 2)

    assert alone.stderr == ""
    assert replicas.returncode == 0, replicas.stderr
    # gloo of torch 2.9 reports its connections first.
    assert tuple(run.stdout.splitlines()[-1] for run in (alone, replicas)) == printed
