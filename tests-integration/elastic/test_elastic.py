"""`nxd train --elastic` goes on when ranks are lost, and ends as a run that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import nxd_ckpt
import pytest
import torch
from nxd_state.testing import deadline

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.usefixtures("fresh_interpreter"),  # whose children are the run's own
]

KILLS = int(os.environ.get("NXD_TEST_KILLS", "10"))
LAYOUTS = {"tp2-dp2": ["parallel.tensor_parallel_size=2"], "pp2-dp2": ["parallel.pipeline_parallel_size=2"]}
ELASTIC = ["--elastic", "2:4", "checkpoint.memory_every=1"]


class Run:
    """A run of four ranks on one host."""

    def __init__(self, folder: Path, settings: list[str], name: str):
        self.output = folder / name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nxd_trainer", "train", "--nproc", "4", *settings, f"output={name}"],
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def records(self) -> list[dict]:
        file = self.output / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def trainers(self) -> list[int]:
        """The processes that compute, whose parents supervise them."""
        supervisors = children_of(self.process.pid)
        return [pid for supervisor in supervisors for pid in children_of(supervisor) if name_of(pid) == "nxd-trainer"]

    def wait_for_step(self, step: int) -> None:
        give_up = time.monotonic() + deadline(120)
        while not (records := self.records()) or records[-1]["step"] < step:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < give_up, self.log
            time.sleep(0.01)

    def end(self) -> int:
        return self.process.wait(deadline(120))


def children_of(pid: int) -> list[int]:
    try:
        return [int(it) for it in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


@pytest.fixture
def start(tiny, tmp_path):
    """`start(name, *settings)` begins a run, which is ended with the test."""
    runs = []

    def begin(name: str, *settings: str) -> Run:
        fixed = [*tiny, "train.eval_every=0", "train.dtype=float64", "checkpoint.save_every=0", *settings]
        runs.append(Run(tmp_path, fixed, name))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def tensors(run: Run) -> dict[str, torch.Tensor]:
    checkpoint = nxd_ckpt.open_checkpoint(run.output / "checkpoints")
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def assert_ended_alike(run: Run, alone: Run) -> None:
    """Bitwise, and each step once in the metrics."""
    assert run.end() == 0, run.log
    assert alone.end() == 0, alone.log
    found, expected = run.records(), alone.records()
    assert [it["step"] for it in found] == [it["step"] for it in expected]
    assert [it["loss"] for it in found] == [it["loss"] for it in expected]
    weights, others = tensors(run), tensors(alone)
    assert weights.keys() == others.keys()
    assert [name for name, tensor in others.items() if not torch.equal(weights[name], tensor)] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_ranks_are_replaced_and_cost_one_step_at_most(start, layout):
    chance = random.Random(layout)
    steps = [*LAYOUTS[layout], f"train.steps={4 * KILLS + 6}"]
    alone = start("alone", *steps)
    assert alone.end() == 0, alone.log
    run = start("run", *steps, *ELASTIC)
    killed, survivors = [], set()
    for number in range(KILLS):
        run.wait_for_step(4 * number + 3)
        trainers = run.trainers()
        survivors = survivors & set(trainers) if survivors else set(trainers)
        killed.append((run.records()[-1]["step"], chance.choice(trainers)))
        os.kill(killed[-1][1], signal.SIGKILL)
        survivors.discard(killed[-1][1])
        run.wait_for_step(killed[-1][0] + 1)

    assert_ended_alike(run, alone)
    resumed = [
        int(line.split("step-")[1].split()[0]) for line in run.log.splitlines() if "the run resumes from" in line
    ]
    assert "in the memory of the hosts" in run.log
    assert len(resumed) >= KILLS
    assert all(any(step - resumes <= 1 for resumes in resumed) for step, _ in killed)
    assert run.log.count("another process takes its place") == KILLS  # and no survivor was given up
    assert not list(Path("/dev/shm").glob(f"nxd-memory-{os.getuid()}-{run.process.pid}-*"))


def test_stopped_rank_is_killed_and_replaced(start):
    alone = start("alone", *LAYOUTS["tp2-dp2"], "train.steps=8")
    assert alone.end() == 0, alone.log
    run = start("run", *LAYOUTS["tp2-dp2"], "train.steps=8", *ELASTIC, "--elastic-silence", "2")
    run.wait_for_step(3)
    os.kill(run.trainers()[2], signal.SIGSTOP)

    assert_ended_alike(run, alone)
    assert "has said nothing for 2 s and is killed" in run.log


def test_error_of_the_program_ends_the_run_and_does_not_loop(start, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(
        "import torch\n"
        "class Broken(torch.optim.SGD):\n"
        "    calls = 0\n"
        "    def step(self, closure=None):\n"
        "        Broken.calls += 1\n"
        "        if Broken.calls == 3:\n"
        "            raise ZeroDivisionError('the third call')\n"
        "        return super().step(closure)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = start("run", *LAYOUTS["tp2-dp2"], *ELASTIC, "optimizer.factory=broken:Broken")

    assert run.end() not in (0, None)
    assert "ZeroDivisionError: the third call" in run.log
    assert "takes its place" not in run.log


def test_stop_of_a_run_is_a_checkpoint_from_which_another_start_goes_on(start):
    alone = start("alone", *LAYOUTS["tp2-dp2"], "train.steps=40")
    assert alone.end() == 0, alone.log
    run = start("run", *LAYOUTS["tp2-dp2"], "train.steps=40", *ELASTIC)
    run.wait_for_step(3)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 143, run.log

    assert_ended_alike(start("run", *LAYOUTS["tp2-dp2"], "train.steps=40", *ELASTIC), alone)


def test_memory_without_elastic_says_what_to_add(start):
    run = start("run", "checkpoint.memory_every=1", *LAYOUTS["tp2-dp2"])

    assert run.end() == 2
    assert "add --elastic" in run.log
