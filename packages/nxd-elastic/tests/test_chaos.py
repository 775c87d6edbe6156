"""Ranks are found, disturbed as the seed says, and what it costs is read from the metrics."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nxd_cli.dispatch import main
from nxd_elastic.chaos import Disturbance, DisturbancePlan, FollowedRun, disturb, measure, render
from nxd_elastic.chaos.follow import LoggedStep, RankProcess, Seen, kill_host, ranks_below

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RANK = RankProcess(1, pid=1, parent=1, host=1)


class Ended:
    pid = 0

    def poll(self):
        return 0


def followed(tmp_path, *seen):
    run = FollowedRun(Ended(), tmp_path)
    run.seen += [Seen(at, it) for at, it in seen]
    return run


def test_measures_of_a_loss_are_the_seconds_to_the_next_step_and_the_steps_taken_again(tmp_path):
    run = followed(
        tmp_path,
        (0.0, LoggedStep(1, layout="TP 2")),
        (1.0, LoggedStep(2)),
        (2.0, LoggedStep(3)),
        (6.5, LoggedStep(3, layout="TP 2", resumed_from=2)),
        (7.5, LoggedStep(4)),
    )
    loss = Disturbance("kill", RANK, step=3, generation=1, at=2.5)
    pause = Disturbance("pause", RANK, step=1, generation=1, at=0.5, seconds=0.4)

    measures = measure(run, [pause, loss])

    assert measures.recoveries == [4.0]
    assert measures.steps_lost == [1]
    assert measures.goodput == pytest.approx(3 * 1.0 / 7.5)  # three steps of a second, in 7.5 s
    assert render(measures, [pause, loss]) == [
        "2 disturbances: pause 1, kill 1",
        "seconds from a loss to the next step: p50 4.0, p90 4.0, max 4.0, of 1",
        "steps lost: 1 at most, 1 in all",
        "goodput 40.0 %",
    ]


def test_measures_of_a_run_without_steps_have_no_goodput(tmp_path):
    assert math.isnan(measure(followed(tmp_path), []).goodput)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"kinds": ("kil",)}, "kinds='kil' contains an unknown kind; use kill, stop, pause, slow, absent, host"),
        ({"steps": (3, 1)}, "steps=3:1 is not a range"),
    ],
)
def test_wrong_plan_says_what_is_right(wrong, told):
    with pytest.raises(ValueError, match=told):
        DisturbancePlan(seed=0, **wrong)


RUN = """
import json, os, subprocess, sys, time

def write(step, **more):
    fields = dict(step=step, loss=1.0, learning_rate=1.0, tokens=1, tokens_per_second=1.0, seconds=1.0)
    with open("metrics.jsonl", "a") as file:
        file.write(json.dumps(fields | dict(peak_memory_bytes=1) | more) + "\\n")

def start(**variables):
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], env=os.environ | variables,
                            stdin=subprocess.PIPE)

ranks = [start(RANK=str(rank), NXD_LAUNCHER_PID=str(os.getpid())) for rank in range(3)]
others = [start(RANK="7"), start(RANK="8", NXD_LAUNCHER_PID="1")]  # of other programs
write(1, layout="TP 1")
lost = 0
while lost < 2:
    for rank in ranks:
        if rank.poll() is not None:
            ranks.remove(rank)
            lost += 1
            write(lost + 1, layout="TP 1", resumed_from=lost)
    time.sleep(0.01)
for one in ranks + others:
    one.stdin.close()
    one.wait()
"""


@pytest.fixture
def process(tmp_path, fresh_interpreter):
    """A run of three ranks that goes on until it has lost two."""
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=tmp_path) as process:
        yield process
        kill_host(process.pid)


def test_ranks_of_a_seed_are_killed_one_after_the_other(process, tmp_path):
    said = []
    run = FollowedRun(process, tmp_path, patience=60)

    done = disturb(run, DisturbancePlan(seed=3, count=2, steps=(0, 0)), said.append)

    assert [it.kind for it in done] == ["kill", "kill"]
    assert {it.rank.number for it in done} < {0, 1, 2}
    assert len({it.rank.pid for it in done}) == 2
    assert {it.rank.host for it in done} == {process.pid}
    assert said == [str(it) for it in done]
    assert len(measure(run, done).recoveries) == 2


def test_supervisor_whose_trainer_has_ended_is_no_rank(fresh_interpreter):
    named = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'nxd-supervisor'); print(flush=True); sys.stdin.read()"
    command, pipe = [sys.executable, "-c", named], subprocess.PIPE
    environment = os.environ | {"RANK": "0", "NXD_LAUNCHER_PID": str(os.getpid())}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as supervisor:
        supervisor.stdout.readline()
        found = ranks_below(os.getpid())
        supervisor.stdin.close()

    assert supervisor.pid not in [rank.pid for rank in found]


def test_paused_rank_runs_again_and_a_run_that_stands_still_is_noticed(process, tmp_path):
    run = FollowedRun(process, tmp_path, patience=60)
    assert run.wait_for_step(1)
    ranks = run.ranks()
    impatient = FollowedRun(process, tmp_path, patience=0.01)

    with pytest.raises(TimeoutError, match=r"no step for 0\.01 s after step 1"):
        disturb(impatient, DisturbancePlan(seed=0, count=1, kinds=("pause",), seconds=(0, 0)))

    assert [rank.number for rank in ranks] == [0, 1, 2]
    assert "T" not in states(ranks)


def states(ranks) -> list[str]:
    return [Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] for rank in ranks]


def test_paused_rank_runs_again_where_the_command_is_ended(process, tmp_path):
    run = FollowedRun(process, tmp_path, patience=60)
    assert run.wait_for_step(1)
    ranks = run.ranks()
    options = ["--output", str(tmp_path), "--pid", str(process.pid), "--kinds", "pause", "--every-seconds", "0"]

    with subprocess.Popen([sys.executable, "-m", "nxd_cli", "chaos", *options], stderr=subprocess.PIPE) as command:
        while "T" not in states(ranks):
            assert run.wait(0.01)
        command.terminate()
        command.communicate()

    assert command.returncode == 143
    assert "T" not in states(ranks)


def test_command_without_a_run_says_what_to_give(capsys):
    assert main(["chaos", "--output", "run"]) == 2
    assert "pass either --pid of a run, or the command that starts one" in capsys.readouterr().err
