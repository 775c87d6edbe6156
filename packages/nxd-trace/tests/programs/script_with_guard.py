"""A script that traces a model of its own, says who its workers are, and then dies without closing it."""

import os
import signal

import nxd_trace
import torch
from torch import nn


def build() -> nn.Module:
    return nn.Linear(2, 2)


if __name__ == "__main__":
    model = nxd_trace.parallel_model_trace(build, torch.zeros(1, 2), tp_degree=2, compiler="export", progress=False)
    print("workers:", *model.worker_pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
