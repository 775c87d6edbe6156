"""A test that leaves something behind fails, by name, and the tests after it do not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAKS = {
    "environment_variable": "os.environ['LEFT'] = 'behind'",
    "removed_variable": "del os.environ['REMOVED']",
    "working_directory": "os.chdir('/')",
    "default_dtype": "torch.set_default_dtype(torch.float64)",
    "default_device": "torch.set_default_device('meta')",
    "threads": "torch.set_num_threads(7)",
    "gradients": "torch.set_grad_enabled(False)",
    "process_group": "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
    "mesh": "nxd_state.initialize_model_parallel()",
    "style": "nxd_layers.hf.register_style('left', print)",
    "child": "kept.append(subprocess.Popen(['cat'], stdin=subprocess.PIPE))",
    "memfd": "kept.append(os.memfd_create('left'))",
    "socket": "kept.append(socket.socket())",
}
MESSAGES = {
    "environment_variable": "environment variable LEFT: 'behind'",
    "removed_variable": "environment variable REMOVED: removed",
    "working_directory": "working directory is: '/', was",
    "default_dtype": "torch's settings default dtype: torch.float64, was torch.float32",
    "default_device": "torch's settings default device: device(type='meta')",
    "threads": "torch's settings number of threads: 7",
    "gradients": "torch's settings gradients: False, was True",
    "process_group": "torch.distributed process group: 1",
    "mesh": "mesh is initialised: ",
    "style": "registered style left",
    "child": "child process",
    "memfd": "/memfd:left",
    "socket": "open descriptor",
}
HEADER = """
import os, socket, subprocess
import nxd_layers.hf, nxd_state, torch
import torch.distributed as dist

kept = []
"""
FOOTER = """
def test_that_leaves_nothing():
    pass
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a session of leaking tests prints."""
    file = tmp_path_factory.mktemp("leaking") / "test_leaking.py"
    tests = "".join(f"def test_{name}():\n    {statement}\n\n" for name, statement in LEAKS.items())
    file.write_text(HEADER + tests + FOOTER)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "conftest", str(file)]
    command.append(f"--basetemp={file.parent}/temporary")
    settings = {"PYTHONPATH": str(ROOT), "REMOVED": "is there", "NXD_TEST_FRESH_INTERPRETERS": "1"}
    environment = os.environ | settings | {"NXD_TESTING_SLOWNESS": "0.1"}  # nothing is on its way out
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LEAKS)
def test_leaking_test_fails_and_says_what_it_left(printed: str, name: str) -> None:
    sections = dict(re.findall(r"^_+ ERROR at teardown of test_(\w+) _+\n(.*?)(?=^[_=]{3})", printed, re.M | re.S))

    assert MESSAGES[name] in sections[name], printed


def test_tests_after_one_that_leaks_pass(printed: str) -> None:
    assert f"{len(LEAKS) + 1} passed, {len(LEAKS)} errors" in re.sub(r" \d+ warnings?,", "", printed), printed
