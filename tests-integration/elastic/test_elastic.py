"""`nxd train --elastic` goes on when ranks are lost, and ends as a run that was left alone."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nxd_ckpt
import pytest
import torch
import torch.distributed as dist
from nxd_elastic.chaos import Disturbance, DisturbancePlan, FollowedRun, Measures, disturb, measure
from nxd_elastic.chaos.follow import RankProcess
from nxd_elastic.members import GenerationKeys
from nxd_testing import deadline
from nxd_trainer.report.metrics import METRICS_FILE, StepRecord, read_records

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.usefixtures("fresh_interpreter"),  # whose children are the run's own
]

QUICKLY = sys.executable  # for runs that nobody disturbs: a fork, where the session has a server of them
LAYOUTS = {"tp2-dp2": ["parallel.tensor_parallel_size=2"], "pp2-dp2": ["parallel.pipeline_parallel_size=2"]}
ELASTIC = ["--elastic", "2:4", "checkpoint.memory_every=1"]
OF_TWO = ["--elastic", "1:2", "checkpoint.memory_every=1"]


class Run:
    """A run on one host."""

    def __init__(self, folder: Path, settings: list[str], name: str, nproc: int, python: str):
        self.output = folder / name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-m", "nxd_cli", "train", "--nproc", str(nproc), *settings, f"output={name}"],
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._followed = FollowedRun(self.process, self.output, patience=deadline(60))

    @property
    def log(self) -> str:
        return self._log.read_text()

    def records(self) -> list[StepRecord]:
        return read_records(self.output / METRICS_FILE)

    def trainers(self) -> list[int]:
        return [rank.pid for rank in self._followed.ranks()]

    def rank(self, number: int) -> RankProcess:
        """By the number that the launcher has given it; waits until there is one."""
        while (found := [rank for rank in self._followed.ranks() if rank.number == number]) == []:
            assert self._followed.wait(0.01), self.log
        return found[0]

    @contextmanager
    def without(self, number: int) -> Iterator[None]:
        """Kill a rank that nobody replaces meanwhile."""
        lost = self.rank(number)
        os.kill(lost.parent, signal.SIGSTOP)
        os.kill(lost.pid, signal.SIGKILL)
        yield
        os.kill(lost.parent, signal.SIGCONT)

    def store_port(self) -> int:
        variables = Path(f"/proc/{self.rank(0).parent}/environ").read_bytes().decode().split("\0")
        return next(int(it.partition("=")[2]) for it in variables if it.startswith("MASTER_PORT="))

    def keys(self) -> GenerationKeys:
        """What its trainers write about generations."""
        return GenerationKeys(dist.TCPStore("127.0.0.1", self.store_port(), wait_for_workers=False))

    def server(self) -> int:
        """The process that keeps checkpoints in this host's memory."""
        processes = [int(it.name) for it in Path("/proc").iterdir() if it.name.isdecimal()]
        return next(pid for pid in processes if f"-{self.process.pid}-" in _command(pid) and "server" in _command(pid))

    def wait_for_step(self, step: int) -> None:
        assert self._followed.wait_for_step(step), self.log

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self._followed.wait(0.001), self.log

    def wait_for_log(self, text: str) -> None:
        while text not in self.log:
            assert self._followed.wait(0.05), self.log

    def disturb(self, plan: DisturbancePlan) -> tuple[list[Disturbance], Measures]:
        done = disturb(self._followed, plan)
        return done, measure(self._followed, done)

    def end(self) -> int:
        return self.process.wait(deadline(120))


def end_as_another_user(port: int) -> None:
    """Have another user of this machine tell the trainers at a store that their generations have failed."""
    words = b"".join(
        b"\1" + b"".join(len(it).to_bytes(8, sys.byteorder) + it for it in (key, b'["failed", "forged"]'))
        for key in (b"/nxd_elastic/1/over", b"/nxd_elastic/2/over")
    )
    hello, ping = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder), b"\x0dping"  # as torch's clients begin
    program = f"""
import contextlib, os, socket
os.setgroups([]), os.setgid(65534), os.setuid(65534)
with socket.socket() as client, contextlib.suppress(ConnectionError):
    client.connect(("127.0.0.1", {port}))
    client.sendall({hello + words + ping!r})
    client.recv(4)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # it has ended
        return ""


@pytest.fixture
def start(tiny, tmp_path):
    """`start(name, *settings)` begins a run of four ranks, or of `nproc`, which is ended with the test."""
    runs = []

    def begin(name: str, *settings: str, nproc: int = 4, python: str = sys.executable) -> Run:
        fixed = [*tiny, "train.eval_every=0", "train.dtype=float64", "checkpoint.save_every=0", *settings]
        runs.append(Run(tmp_path, fixed, name, nproc, python))
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
    assert [it.step for it in found] == [it.step for it in expected]
    assert [it.loss for it in found] == [it.loss for it in expected]
    weights, others = tensors(run), tensors(alone)
    assert weights.keys() == others.keys()
    assert [name for name, tensor in others.items() if not torch.equal(weights[name], tensor)] == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])  # one that was there, and the one that joins
@pytest.mark.parametrize("moment", ["announced", "made up"])
def test_rank_that_dies_while_another_joins_costs_one_step_at_most(start, moment, victim):
    steps = [*LAYOUTS["tp2-dp2"], "train.steps=150"]
    alone = start("alone", *steps, python=QUICKLY)
    assert alone.end() == 0, alone.log
    run = start("run", *steps, *ELASTIC, "--elastic-grace", "2")
    run.wait_for_step(3)
    keys = run.keys()
    with run.without(2):
        run.wait_for_log("TP 2 x DP 1")
        run.wait_for_step(run.records()[-1].step + 3)
        following = keys.latest() + 1
    if moment == "announced":
        run.wait_until(lambda: 0 in keys.announced(following, 4))
    else:
        run.wait_until(lambda: keys.fixed_generation(following) is not None)
    taken = run.records()[-1].step
    os.kill(run.rank(victim).pid, signal.SIGKILL)

    assert run.end() == 0, run.log
    found, expected = run.records(), alone.records()
    assert [it.step for it in found] == [it.step for it in expected]
    assert [it.loss for it in found] == pytest.approx([it.loss for it in expected], rel=1e-10)
    resumed = [int(it) for it in re.findall(r"the run resumes from step-(\d+)", run.log)]
    assert resumed[-1] >= taken - 1


class TestDisturbedRun:
    """Each takes its time, so one of them a day."""

    pytestmark = pytest.mark.sample(1)

    @pytest.mark.parametrize(
        ("layout", "kills"),
        [("tp2-dp2", 2), *(pytest.param(layout, 10, marks=pytest.mark.slow) for layout in LAYOUTS)],
    )
    def test_killed_ranks_are_replaced_and_cost_one_step_at_most(self, start, layout, kills):
        steps = [*LAYOUTS[layout], f"train.steps={5 * kills + 6}"]
        alone = start("alone", *steps, python=QUICKLY)
        assert alone.end() == 0, alone.log
        run = start("run", *steps, *ELASTIC)

        killed, measures = run.disturb(DisturbancePlan(seed=26, count=kills, steps=(1, 3)))

        assert_ended_alike(run, alone)
        assert len(killed) == len(measures.recoveries) == kills
        assert max(measures.steps_lost) <= 1
        assert run.log.count("; the run resumes from") == run.log.count("in the memory of the hosts") == kills
        assert run.log.count("another process replaces it") == kills  # and no survivor was given up
        assert not list(Path("/dev/shm").glob(f"nxd-memory-{os.getuid()}-*-{run.process.pid}-*"))

    @pytest.mark.parametrize(
        ("number", "said"),
        [
            (signal.SIGKILL, "was killed by SIGKILL"),
            pytest.param(signal.SIGSTOP, "has not answered for 3 s and was killed", marks=pytest.mark.slow),
        ],
    )
    def test_lost_memory_server_of_memory_is_replaced_and_the_next_loss_costs_one_step_at_most(
        self, start, number, said
    ):
        run = start("run", *LAYOUTS["tp2-dp2"], "train.steps=300", *ELASTIC, "--elastic-silence", "3")
        run.wait_for_step(3)
        os.kill(run.server(), number)
        run.wait_for_log(f"the memory server of this host {said}; it was restarted with its contents")
        step = run.records()[-1].step + 5
        run.wait_for_step(step)  # checkpoints in memory are complete again
        os.kill(run.trainers()[2], signal.SIGKILL)
        run.wait_for_log("in the memory of the hosts")

        resumed = re.search(r"resumes from step-(\d+) in the memory of the hosts", run.log)
        assert int(resumed[1]) >= step - 1
        run.wait_for_step(int(resumed[1]) + 5)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 143, run.log

    def test_stopped_rank_is_killed_and_replaced_whatever_another_user_tells_the_store(self, start):
        alone = start("alone", "train.steps=8", nproc=2, python=QUICKLY)
        assert alone.end() == 0, alone.log
        run = start("run", "train.steps=8", *OF_TWO, "--elastic-silence", "2", nproc=2)
        run.wait_for_step(3)
        if os.geteuid() == 0:
            end_as_another_user(run.store_port())
        os.kill(run.trainers()[1], signal.SIGSTOP)

        assert_ended_alike(run, alone)
        assert "has been silent for 2 s and was killed" in run.log

    def test_error_of_the_program_ends_the_run_and_does_not_loop(self, start, tmp_path, monkeypatch):
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
        run = start("run", *OF_TWO, "optimizer.factory=broken:Broken", nproc=2, python=QUICKLY)

        assert run.end() not in (0, None)
        assert "ZeroDivisionError: the third call" in run.log
        assert "replaces it" not in run.log

    def test_stop_of_a_run_is_a_checkpoint_from_which_another_start_goes_on(self, start):
        alone = start("alone", "train.steps=40", nproc=2, python=QUICKLY)
        assert alone.end() == 0, alone.log
        run = start("run", "train.steps=40", *OF_TWO, nproc=2, python=QUICKLY)
        run.wait_for_step(3)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 143, run.log

        assert_ended_alike(start("run", "train.steps=40", *OF_TWO, nproc=2, python=QUICKLY), alone)


def test_memory_without_elastic_says_what_to_add(start):
    run = start("run", "checkpoint.memory_every=1", nproc=2, python=QUICKLY)

    assert run.end() == 2
    assert "add --elastic" in run.log
