"""Two ranks that add up a number: what every training step does, tried before one is started."""

import os
import signal
import subprocess
import sys

from nxd_trainer.doctor.finding import Finding, ok, wrong

TIMEOUT_SECONDS = 120.0
PROGRAM = """
import torch
from nxd_state import all_reduce, destroy_model_parallel, get_device, get_world_group, initialize_model_parallel
initialize_model_parallel(2)
group = get_world_group()
total = all_reduce(torch.full((4,), group.rank + 1.0, device=get_device()), group)
assert total.tolist() == [3.0] * 4, total
destroy_model_parallel()
"""
LAUNCHER = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1", "--rdzv-backend=c10d")
LEFT_TO_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run_two_ranks(timeout: float = TIMEOUT_SECONDS) -> tuple[int | None, str]:
    """Start two ranks on this machine and let them add.

    Returns:
        Their exit code, None if they were not done in time, and what they wrote.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_TO_TORCHRUN}
    command = [sys.executable, *LAUNCHER, "--rdzv-endpoint=localhost:0", "--no-python", sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command,
        env=environment | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # torchrun and its ranks
            output, _ = process.communicate()
            return None, output
        except BaseException:  # as Ctrl-C, which does not reach them in a session of their own
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def check_collective(code: int | None, output: str) -> Finding:
    """Whether the two ranks came to the sum, and in time."""
    name = "two ranks"
    if code == 0:
        return ok(name, "added their numbers")
    if code is None:
        mend = "ranks wait for each other: look at the findings above, then try NXD_DEVICE=cpu nxd doctor"
        return wrong(name, f"were not done in {TIMEOUT_SECONDS:.0f} seconds", mend)
    errors = [line.strip() for line in output.splitlines() if "Error" in line and "ChildFailed" not in line]
    return wrong(
        name,
        f"failed: {errors[0] if errors else f'exit code {code}'}",
        "nxd doctor --show-output shows all that they wrote",
    )
