"""The memory report: what it measures is there, and what it predicts is measured."""

import pytest
import torch
from nxd_optim import NeuronZero1Optimizer
from nxd_state import initialize_model_parallel
from torch import nn


def report_after_a_step(dtype, **settings):
    initialize_model_parallel()
    model = nn.Linear(512, 512).to(dtype)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **settings)
    batch = torch.ones(2, 512, dtype=dtype)
    model(batch).sum().backward()
    optimizer.step()
    model(batch).sum().backward()
    return optimizer.memory_report()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("dtype", "master_bytes"), [(torch.float32, 0), (torch.bfloat16, 4)])
def test_report_predicts_what_it_measures(run_ranks, size, dtype, master_bytes):
    report = run_ranks(report_after_a_step, size, dtype)[0]

    elements = 512 * 512 + 512
    measured, predicted = report.measured, report.predicted
    assert predicted.parameters == elements * dtype.itemsize
    assert predicted.gradients == elements * dtype.itemsize
    assert predicted.state == elements * 8 // size
    assert predicted.master_weights == elements * master_bytes // size
    for kind in ("parameters", "gradients", "mean_gradients", "master_weights", "state"):
        assert getattr(measured, kind) == pytest.approx(getattr(predicted, kind), rel=0.01)


def test_report_prints_a_table(run_ranks):
    table = str(run_ranks(report_after_a_step, 1, torch.float32)[0])

    assert [line.split()[0] for line in table.splitlines()[1:]] == [
        "parameters",
        "gradients",
        "mean",
        "master",
        "state",
        "buckets",
    ]
    assert "1.0 MiB" in table


def test_report_of_a_capturable_optimizer_is_that_of_an_ordinary_one():
    reports = [
        NeuronZero1Optimizer([nn.Parameter(torch.ones(8))], torch.optim.AdamW, capturable=capturable).memory_report()
        for capturable in (True, False)
    ]

    assert reports[0] == reports[1]
