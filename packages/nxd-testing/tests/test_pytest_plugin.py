"""The fixture `run_ranks`, in a pytest session of its own."""

import subprocess
import sys

PLUGIN = "nxd_testing.pytest_plugin"

TESTS = """
import os
import pytest

def speak():
    print("hello from", os.environ["RANK"])
    return os.getpid()

pids = []

def test_passes(run_ranks):
    pids.extend(run_ranks(speak, 2))

def test_fails_after_the_job(run_ranks):
    assert run_ranks(speak, 2) != pids, "the processes were reused"

def test_fails_in_the_job(run_ranks):
    def fail():
        print("about to fail")
        assert os.environ["RANK"] == "0"

    run_ranks(fail, 2)
"""


def run_pytest(path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", PLUGIN, "--import-mode=importlib", *arguments, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout


def test_run_ranks_failing_tests_show_the_output_of_the_ranks(tmp_path):
    (tmp_path / "test_example.py").write_text(TESTS)

    stdout = run_pytest(tmp_path)

    assert "1 passed" in stdout
    assert "2 failed" in stdout
    assert "the processes were reused" in stdout
    after_the_job, in_the_job = stdout.split("FAILURES")[1].split("test_fails_in_the_job", maxsplit=1)
    assert "[rank 1] hello from 1" in after_the_job
    assert "[rank 1] about to fail" in in_the_job
    assert "assert os.environ[" in in_the_job


def test_run_ranks_is_listed_among_the_fixtures(tmp_path):
    (tmp_path / "test_example.py").write_text("")

    stdout = run_pytest(tmp_path, "--fixtures")

    assert "run_ranks" in stdout
