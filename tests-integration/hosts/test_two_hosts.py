"""Runs over hosts with a network between them: the same losses as one process, and what goes wrong there."""

import json
import shutil
import subprocess
import sys
import threading
import time

import pytest
from nxd_testing import deadline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_interpreter"),  # a fork of the test run's server would be in this machine's network
]

TRAIN = ["-m", "nxd_cli", "train"]


def said_by(ended):
    """What the programs of all hosts printed."""
    return "\n".join(it.output for it in ended)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def wait_for(condition, process, seconds=180.0):
    """Wait until a condition holds, or a process has ended."""
    end = time.monotonic() + deadline(seconds)
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


@pytest.fixture
def expected(tiny_in, tmp_path_factory):
    """The losses of one process on the same data."""
    folder = tmp_path_factory.mktemp("one")
    subprocess.run([sys.executable, *TRAIN, *tiny_in(folder)], cwd=folder, check=True, capture_output=True)
    return losses(folder / "run")


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.tensor_parallel_size=2"],
        ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"],
    ],
    ids=["TP within, DP between", "TP within, PP between"],
)
def test_training_on_two_hosts_equals_one_process(hosts, tiny_in, tmp_path, expected, layout):
    ended = hosts(2).torchrun([*TRAIN, *tiny_in(tmp_path), *layout])

    assert [it.returncode for it in ended] == [0, 0], said_by(ended)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
    assert (tmp_path / "run/checkpoints/step-00000006/manifest.json").exists()


def test_training_on_four_hosts_equals_one_process(hosts, tiny_in, tmp_path, expected):
    ended = hosts(4).torchrun([*TRAIN, *tiny_in(tmp_path), "parallel.pipeline_parallel_size=2"], per_host=1)

    assert [it.returncode for it in ended] == [0] * 4, said_by(ended)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


def test_hosts_meet_over_ipv6(hosts, tiny_in, tmp_path, expected):
    ended = hosts(2).torchrun([*TRAIN, *tiny_in(tmp_path)], per_host=1, address="fd77::1")

    assert [it.returncode for it in ended] == [0, 0], said_by(ended)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


def test_network_that_stops_for_seconds_only_delays_the_run(hosts, tiny_in, tmp_path, expected):
    both = hosts(2)
    ended, steps_before = threading.Event(), []

    def unplug_after_the_first_step():
        metrics = tmp_path / "run/metrics.jsonl"
        while not ended.is_set() and not (metrics.exists() and losses(tmp_path / "run")):
            ended.wait(0.01)
        both.set_link(1, "down")
        steps_before.append(len(losses(tmp_path / "run")))
        ended.wait(3.0)
        both.set_link(1, "up")

    thread = threading.Thread(target=unplug_after_the_first_step)
    thread.start()
    try:
        found = both.torchrun([*TRAIN, *tiny_in(tmp_path)], per_host=1)
    finally:
        ended.set()
        thread.join()

    assert [it.returncode for it in found] == [0, 0], said_by(found)
    assert steps_before[0] < 6, "the run was over before the network stopped"
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


def test_elastic_run_goes_on_without_a_host_that_is_lost(hosts, tiny_in, tmp_path, expected):
    both = hosts(2)
    for host in range(2):  # as on Debian
        both.names(host).write_text(f"127.0.1.1 host{host}\n10.77.0.1 host0\n")
    elastic = ["--elastic", "1:2", "--elastic-grace", "2", "checkpoint.memory_every=1", "checkpoint.memory_copies=1"]
    meet = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meet, "--max-restarts", "100"]
    command = [*torchrun, *TRAIN, *tiny_in(tmp_path), *elastic]
    first, second = both.start(0, command), both.start(1, command)
    metrics, last = tmp_path / "run/metrics.jsonl", tmp_path / "run/checkpoints/step-00000006/manifest.json"

    wait_for(lambda: metrics.exists() and len(losses(tmp_path / "run")) >= 2, first)
    second.kill()
    wait_for(last.exists, first)  # and not for torchrun, which waits five minutes for the agent of the lost host

    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
    layouts = [json.loads(line).get("layout") for line in metrics.read_text().splitlines()]
    assert [it for it in layouts if it] == ["TP 1 x DP 2", "TP 1 x DP 1"], "the run was over before the host was lost"


def test_folder_that_hosts_do_not_share_is_refused_before_the_first_step(hosts, tiny_in, tmp_path):
    both = hosts(2)

    ended = both.torchrun([*TRAIN, *tiny_in(tmp_path), f"output={both.local}/run"], per_host=1)

    said = said_by(ended)
    assert all(it.returncode != 0 for it in ended), said
    assert "is not the same folder on all hosts" in said, said
    assert "step 1" not in said


def test_tasks_of_slurm_on_two_hosts_train_as_one_process(hosts, tiny_in, tmp_path, expected):
    both = hosts(2)
    command = [sys.executable, *TRAIN, *tiny_in(tmp_path), "parallel.tensor_parallel_size=2"]
    for task in range(4):
        both.start(
            task // 2,
            command,
            {
                "SLURM_JOB_ID": "1234",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_NODELIST": "host[0-1]",
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task % 2),
            },
        )

    ended = both.wait()

    assert [it.returncode for it in ended] == [0] * 4, said_by(ended)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("names", "address"),
    [
        (["127.0.0.1 localhost", "127.0.0.1 localhost"], "10.77.0.1"),
        (["127.0.1.1 host0\n10.77.0.1 host0", "127.0.1.1 host1\n10.77.0.1 host0"], "host0"),
        (["127.0.1.1 host0", "127.0.1.1 host1"], "fd77::1"),
    ],
    ids=["no address", "loopback, as on Debian", "over IPv6"],
)
def test_hosts_whose_own_names_lead_nowhere_train_as_one_process(hosts, tiny_in, tmp_path, expected, names, address):
    both = hosts(2)
    for host, text in enumerate(names):
        both.names(host).write_text(f"{text}\n")

    ended = both.torchrun([*TRAIN, *tiny_in(tmp_path)], per_host=1, address=address)

    assert [it.returncode for it in ended] == [0, 0], said_by(ended)
    assert said_by(ended).count("gloo listens on eth0 instead") == 2
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


def test_hosts_whose_clocks_are_an_hour_apart_train_save_and_resume(hosts, tiny_in, tmp_path, expected):
    faketime = shutil.which("faketime")
    if faketime is None:
        pytest.skip("needs the command faketime")
    both = hosts(2)
    command = [*TRAIN, *tiny_in(tmp_path), "checkpoint.save_every=2"]

    for steps in (["train.stop_after=4"], []):
        ended = both.torchrun([*command, *steps], per_host=1, on_last=[faketime, "-m", "-f", "+1h"])
        assert [it.returncode for it in ended] == [0, 0], said_by(ended)

    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
