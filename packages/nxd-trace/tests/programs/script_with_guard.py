"""A script that traces a model, prints its worker processes, stops some of them, and then dies.

python script_with_guard.py [NAME...], of "rank 0", "rank 1" and "fork server".
"""

import os
import signal
import sys
from pathlib import Path

import nxd_trace
import torch
from torch import nn


def build() -> nn.Module:
    return nn.Linear(2, 2)


def status_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while status_of(pid)[0] != "T":
        pass


if __name__ == "__main__":
    model = nxd_trace.parallel_model_trace(build, torch.zeros(1, 2), tp_degree=2, compiler="export", progress=False)
    first, second = model.worker_pids
    processes = {"rank 0": first, "rank 1": second, "fork server": int(status_of(first)[1])}
    print("processes:", *processes.values(), flush=True)
    for name in sys.argv[1:]:
        stop(processes[name])
    os.kill(os.getpid(), signal.SIGKILL)
