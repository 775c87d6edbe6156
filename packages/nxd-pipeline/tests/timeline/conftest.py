"""Steps traced on two ranks, and on four as two pipelines, made once for all tests."""

import json

import pytest
import torch
from nxd_pipeline import NxDPPModel
from nxd_state import initialize_model_parallel
from nxd_testing import run_on_ranks
from torch import nn

STEPS, MICROBATCHES = 2, 4
CASES = {"1f1b": 1, "interleaved": 2, "zb-v": 2}  # stages per rank


class Layer(nn.Linear):
    def forward(self, hidden):
        return hidden + torch.tanh(super().forward(hidden))


class Loss(nn.Module):
    def forward(self, hidden):
        return hidden.square().mean()


def _make_pipeline(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(32, 32) for _ in range(4)), Loss())
    return NxDPPModel(model, Layer, MICROBATCHES, auto_partition=True, **options)


def _train(file, steps, pipeline_size, **options):
    initialize_model_parallel(pipeline_model_parallel_size=pipeline_size)
    model = _make_pipeline(trace_file_path=file, **options)
    for _ in range(steps):
        model.run_train(input=torch.randn(64, 32))
    return model.bubble_report()


@pytest.fixture(scope="session")
def make_pipeline():
    """A function that makes a pipeline; for the ranks of a job."""
    return _make_pipeline


@pytest.fixture(scope="session")
def trace_files(tmp_path_factory):
    """By schedule, the file of two traced steps on two ranks and each rank's report."""
    folder = tmp_path_factory.mktemp("traces")
    traces = {}
    for schedule, stages_per_rank in CASES.items():
        file = folder / schedule / "trace.json"
        reports = run_on_ranks(
            lambda: _train(file, STEPS, 2, schedule=schedule, virtual_pipeline_size=stages_per_rank),  # noqa: B023
            2,
        )
        traces[schedule] = file, reports
    return traces


@pytest.fixture(scope="session")
def file_of_two_pipelines(tmp_path_factory):
    """The file of one step of two pipelines of two ranks each."""
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    run_on_ranks(lambda: _train(file, 1, 2), 4)
    return file


@pytest.fixture(params=CASES)
def trace(request, trace_files):
    """The content of one of the files."""
    return json.loads(trace_files[request.param][0].read_text())
