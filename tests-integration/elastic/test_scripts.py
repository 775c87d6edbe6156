"""`nxd_elastic.run` in a script that torchrun starts: ranks that are lost, and signals to end."""

import json
import os
import signal
import subprocess
import sys

import pytest
from nxd_testing import deadline

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.sample(1),  # each takes its time
]

SCRIPT = """
import json, os, signal, sys
import torch
import torch.distributed as dist
from nxd_ckpt import latest, load, save
from nxd_state import all_gather_object, get_world_group
import nxd_elastic as elastic

steps, victim = int(sys.argv[1]), sys.argv[2]


def train_once(member):
    member.initialize()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if latest("checkpoints") is not None:
        load("checkpoints", into=state)
    for step in range(state["step"], steps):
        if any(all_gather_object(member.step_boundary(), get_world_group())):
            raise elastic.ChangeMembers
        if victim == "rank" and step == 3 and member.rank == 1 and member.generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(batch[member.rank :: member.world_size]).pow(2).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        save("checkpoints", f"step-{step + 1}", state)
        if step == 3 and member.rank == 0:
            print("took step 3", flush=True)
    return model.weight.flatten().tolist()


weights = elastic.run(train_once, min_ranks=2, grace=60)
with open(f"weights-{os.getpid()}.json", "w") as file:
    json.dump(weights, file)
"""


@pytest.fixture
def torchrun(tmp_path):
    """Starts the script on two ranks; what is still there at the end is killed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    started = []

    def start(name, *arguments):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
        process = subprocess.Popen(
            command, cwd=tmp_path / name, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def weights_of_both_ranks(process, folder):
    """Ranks write files: what two processes print on one pipe may be mixed within a line."""
    _, errors = process.communicate(timeout=deadline(120))
    assert process.returncode == 0, errors
    first, second = [json.loads(path.read_text()) for path in folder.glob("weights-*.json")]
    assert first == second
    return first, errors


def test_script_ends_with_the_same_weights_where_a_rank_is_killed(torchrun, tmp_path):
    process = torchrun("alone", "../script.py", "6", "nobody")
    alone, said = weights_of_both_ranks(process, tmp_path / "alone")
    assert "torchrun's --max-restarts is 0; set it to a value such as 100" in said

    process = torchrun("killed", "--max-restarts", "3", "../script.py", "6", "rank")
    killed, said = weights_of_both_ranks(process, tmp_path / "killed")

    assert "was killed by SIGKILL; another process replaces it" in said
    assert killed == alone


@pytest.mark.parametrize(
    ("steps", "reason"), [(0, ", 10 times in a row without taking a step"), (1, " after 12 restarts; see torchrun's")]
)
def test_script_that_dies_again_and_again_is_given_up_if_it_takes_no_step(torchrun, tmp_path, steps, reason):
    (tmp_path / "dying.py").write_text(f"""
import os, signal
import nxd_elastic as elastic


def train_once(member):
    for _ in range({steps} + 1):
        member.step_boundary()
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":  # torchrun starts it anew
    elastic.run(train_once, min_ranks=1)
""")

    process = torchrun("run", "--nproc-per-node", "1", "--max-restarts", "12", "../dying.py")
    _, errors = process.communicate(timeout=deadline(120))

    assert process.returncode == 0
    assert f"was killed by SIGKILL{reason}" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_script_that_handles_no_signal_is_ended_by_it_at_once(torchrun, number):
    process = torchrun("run", "--max-restarts", "3", "../script.py", "1000000", "nobody")
    for line in process.stdout:
        if line.startswith("took step"):
            break
    os.kill(process.pid, number)

    _, errors = process.communicate(timeout=deadline(120))
    assert process.returncode != 0
    # A peer may fail first, before its own supervisor has the signal: only ranks that the signal ended are looked at.
    assert f"killed by {number.name}; another process replaces it" not in errors
