"""A script that lacks its main guard."""

import nxd_trace
import torch
from torch import nn


def build() -> nn.Module:
    return nn.Linear(2, 2)


model = nxd_trace.parallel_model_trace(build, torch.zeros(1, 2), compiler="export", progress=False)
