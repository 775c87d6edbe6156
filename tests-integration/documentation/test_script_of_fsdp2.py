"""The script of the page on FSDP2 stops on SIGTERM: what a page cannot show by its commands."""

from pathlib import Path

import pytest
from nxd_ckpt import list_checkpoints
from nxd_testing import run_torchrun
from pages import blocks_of

PAGE = Path(__file__).parents[2] / "docs/how-to/checkpoint-an-fsdp2-loop.md"
STEP = '        state["step"] += 1\n'
SIGNAL = '        if state["step"] == 3 and rank == 1:\n            signal.raise_signal(signal.SIGTERM)\n'


@pytest.mark.slow
def test_script_saves_and_ends_on_all_ranks_if_one_gets_sigterm(tmp_path):
    (script,) = [block.text for block in blocks_of(PAGE.read_text(encoding="utf8")) if block.title == "train.py"]
    assert script.count(STEP) == 1
    path = tmp_path / "train.py"
    path.write_text(script.replace(STEP, STEP + SIGNAL).replace('"runs"', repr(str(tmp_path / "runs"))))

    stopped = run_torchrun([str(path), "7"], nproc=2)
    assert stopped.returncode == 0, stopped.stderr
    assert [info.step for info in list_checkpoints(tmp_path / "runs")] == [3]

    resumed = run_torchrun([str(path), "7"], nproc=2)
    assert resumed.returncode == 0, resumed.stderr
    assert [info.step for info in list_checkpoints(tmp_path / "runs")] == [3, 7]
