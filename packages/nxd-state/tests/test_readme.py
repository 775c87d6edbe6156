"""The README's programs, run as they stand there, print what it says they print."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nxd_state
import pytest
from nxd_testing import RankFailure, run_on_ranks, run_torchrun

pytestmark = pytest.mark.smoke

README = (Path(__file__).parents[1] / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
OUTPUTS = re.findall(r"^```output\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
CONSOLES = dict(re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL))


def lines(output):
    """Without what gloo itself says on stdout in older versions of torch."""
    return [line for line in output.splitlines() if not line.startswith("[Gloo]")]


@pytest.fixture
def folder(tmp_path):
    """A folder with the programs that have a name."""
    for program in PROGRAMS:
        if name := re.match(r"# (\S+\.py)\n", program):
            (tmp_path / name[1]).write_text(program)
    return tmp_path


def test_program_of_one_process_prints_what_the_readme_says():
    (program,) = (text for text in PROGRAMS if not text.startswith("# "))

    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert lines(result.stdout) == lines(*OUTPUTS), result.stderr


def test_program_of_several_ranks_prints_what_the_readme_says(folder):
    output = CONSOLES["torchrun --standalone --nproc-per-node 4 ranks.py"]

    result = run_torchrun([str(folder / "ranks.py")], 4)

    # What gloo of torch 2.9 reports may come in between, and lines of two ranks may follow without an
    # end of line in between: torchrun's output is unbuffered.
    assert [line for line in lines(output) if line not in result.stdout] == [], result.stderr
    assert result.stdout.count("tp rank") == len(lines(output))


def test_program_of_ranks_that_disagree_raises_what_the_readme_says(folder):
    output = CONSOLES["NXD_DEBUG_COLLECTIVES=1 torchrun --standalone --nproc-per-node 2 disagree.py"]

    with pytest.raises(RankFailure) as raised:
        run_on_ranks(runpy.run_path, 2, str(folder / "disagree.py"), env={"NXD_DEBUG_COLLECTIVES": "1"})

    printed = str(raised.value).replace(str(folder), "/home/me")
    assert [line for line in output.splitlines() if line not in printed] == [], printed


def test_getters_of_the_readme_are_all_there_are():
    documented = set(re.findall(r"`(get_\w+)\(", README))
    exported = {name for name in nxd_state.__all__ if name.startswith("get_")}
    assert documented - exported == set()
    assert exported - documented == {"get_shard_spec"}
