"""Whole hosts are lost, each played by an agent of torchrun with its ranks: the run goes on with the others."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import nxd_ckpt
import pytest
import torch
from nxd_ckpt.cli import main as nxd_ckpt_main
from nxd_elastic.chaos import FollowedRun
from nxd_elastic.chaos.follow import kill_host, ranks_below
from nxd_state.processes import Process
from nxd_testing import deadline
from nxd_trainer.report.metrics import METRICS_FILE, read_records

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.usefixtures("fresh_interpreter"),  # whose children are the run's own
]

STEPS = 12
FLOAT64 = ["train.eval_every=0", "train.dtype=float64", "parallel.tensor_parallel_size=2"]


class Agents:
    """Several agents of torchrun; the first one has the stores, for the rendezvous and for the job."""

    def __init__(self, folder: Path, number: int, nproc: int, settings: list[str]):
        self.output, self._log = folder / "run", folder / "run.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._endpoint = free.getsockname()
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._endpoint[1]}", "--rdzv-id=hosts"]
        launch = [f"--nnodes=1:{number}", f"--nproc-per-node={nproc}", *rendezvous, "--local-addr=127.0.0.1"]
        self._command = [sys.executable, "-m", "torch.distributed.run", *launch, "--max-restarts=100"]
        self._command += ["-m", "nxd_cli", "train", *settings, "output=run"]
        self.processes = [self._start(folder)]
        self.run = FollowedRun(self.processes[0], self.output, patience=deadline(120))
        while not self._store_is_there():
            assert self.run.wait(0.05), self.log
        self.processes += [self._start(folder) for _ in range(number - 1)]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for_step(self, step: int) -> None:
        assert self.run.wait_for_step(step), self.log

    def lose(self, *numbers: int) -> None:
        """Hosts, at once: the agent, and all that it has started."""
        for number in numbers:
            self.processes[number].send_signal(signal.SIGSTOP)
        for number in numbers:
            kill_host(self.processes[number].pid)

    def lose_agent(self, number: int) -> None:
        """The agent, which takes its ranks with it; they are not killed here."""
        self.processes[number].kill()

    def supervisors(self, *numbers: int) -> list[Process]:
        """What agents have started for their ranks; the trainers end with them."""
        return [Process.of(rank.parent) for it in numbers for rank in ranks_below(self.processes[it].pid)]

    def close(self) -> None:
        for process in self.processes:
            kill_host(process.pid)
            process.wait()

    def _start(self, folder: Path) -> "subprocess.Popen[bytes]":
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _store_is_there(self) -> bool:
        with suppress(OSError):
            socket.create_connection(self._endpoint, 1).close()
            return True
        return False


def wait_for_end(processes: Sequence[Process], run: Agents) -> None:
    """Until none of them is left."""
    own, give_up = Process.of(os.getpid()), time.monotonic() + deadline(120)
    while left := [it.pid for it in processes if not it.has_ended(own)]:
        assert time.monotonic() < give_up, f"{left}\n{run.log}"
        time.sleep(0.05)


@pytest.fixture
def start(tiny, tmp_path):
    """`start(agents, nproc, *settings)` begins a run, which is ended with the test."""
    runs = []

    def begin(number: int, nproc: int, *settings: str) -> Agents:
        runs.append(Agents(tmp_path, number, nproc, [*tiny, *FLOAT64, *settings]))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture
def alone(tiny, tmp_path):
    """The losses and weights of a run of one process that is left alone."""
    command = [sys.executable, "-m", "nxd_cli", "train", *tiny, *FLOAT64, f"train.steps={STEPS}", "output=alone"]
    subprocess.run(
        [*command, "parallel.tensor_parallel_size=1"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=deadline(120),
    )
    return tmp_path / "alone"


def assert_ended_as(alone: Path, run: Agents) -> None:
    """To 1e-10, and each step once in the metrics."""
    found, expected = (read_records(output / METRICS_FILE) for output in (run.output, alone))
    assert [it.step for it in found] == [it.step for it in expected]
    assert [it.loss for it in found] == pytest.approx([it.loss for it in expected], rel=1e-10)
    while not (run.output / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").exists():
        assert run.run.wait(0.1), run.log
    own, other = (nxd_ckpt.open_checkpoint(output / "checkpoints") for output in (run.output, alone))
    for name in other.tensors:
        if "rng" not in name:
            torch.testing.assert_close(own.read(name), other.read(name), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lost", ["host", "agent"])
def test_lost_host_is_done_without(start, alone, lost):
    run = start(
        2, 2, f"train.steps={STEPS}", "checkpoint.save_every=0", "--elastic", "2:4", "checkpoint.memory_every=1"
    )
    run.wait_for_step(4)
    supervisors = run.supervisors(1)
    (run.lose if lost == "host" else run.lose_agent)(1)
    wait_for_end(supervisors, run)
    run.wait_for_step(STEPS)

    assert_ended_as(alone, run)
    assert "TP 2 x DP 1" in run.log
    assert "in the memory of the hosts" in run.log


def test_two_lost_hosts_of_four_are_done_without_where_memory_has_two_copies(start, alone):
    memory = ["checkpoint.memory_every=1", "checkpoint.memory_copies=2"]
    run = start(4, 1, f"train.steps={STEPS}", "checkpoint.save_every=0", "--elastic", "2:4", *memory)
    run.wait_for_step(4)
    run.lose(1, 2)  # neighbours, as copies go round
    run.wait_for_step(STEPS)

    assert_ended_as(alone, run)
    assert "in the memory of the hosts" in run.log


def test_hosts_lost_while_the_others_agree_are_done_without(start, alone):
    memory = ["checkpoint.memory_every=1", "checkpoint.memory_copies=2"]
    run = start(4, 1, f"train.steps={STEPS}", "checkpoint.save_every=0", "--elastic", "2:4", *memory)
    run.wait_for_step(4)
    run.lose(3)
    while "is over" not in run.log:  # the others have left, and meet again
        assert run.run.wait(0.01), run.log
    run.lose(2)
    run.wait_for_step(STEPS)

    assert_ended_as(alone, run)


@pytest.mark.parametrize("lost", ["host", "agent"])
def test_loss_of_the_store_ends_the_run_and_another_start_goes_on_from_the_disk(start, alone, lost):
    settings = [f"train.steps={STEPS}", "checkpoint.save_every=2", "--elastic", "2:4", "checkpoint.memory_every=1"]
    run = start(2, 2, *settings)
    run.wait_for_step(5)
    supervisors = run.supervisors(0, 1)
    (run.lose if lost == "host" else run.lose_agent)(0)
    wait_for_end(supervisors, run)

    advice = "the job's store cannot be reached, so its host is gone; start the job again, it resumes from the newest"
    assert advice in run.log
    newest = nxd_ckpt.latest(run.output / "checkpoints")
    assert newest.step >= 4
    assert nxd_ckpt_main(["verify", "--deep", str(run.output / "checkpoints"), "--tag", newest.tag]) == 0
    again = start(2, 2, *settings)
    again.wait_for_step(STEPS)

    assert_ended_as(alone, again)
    assert f"resumes from {newest.tag}" in again.log
