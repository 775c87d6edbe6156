"""Programs of unusual build: several models, evaluation beside training, gradients that are added up in a bucket."""

import copy

import pytest
import torch
import torch.distributed as dist
from nxd_parity import InFloat64, compare, record
from torch import nn

ROWS = 4


def own_rows(rows):
    """Return a rank's part of the rows; all in one process."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return rows.chunk(ranks)[dist.get_rank() if ranks > 1 else 0]


def average(tensor):
    if dist.is_initialized():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def train_two_models(fault):
    """An encoder and a decoder that are called by themselves, whose parameters have the same names."""
    encoder, decoder = nn.Linear(3, 5), nn.Linear(5, 2)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    for _ in range(2):
        decoder(encoder(own_rows(torch.randn(ROWS, 3))).tanh()).square().mean().backward()
        for parameter in [*encoder.parameters(), *decoder.parameters()]:
            if not (fault and parameter is decoder.bias):
                average(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def train_with_average_weights(fault):
    """A copy of the model has averages of its weights, and is evaluated after each step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    averaged = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(ROWS, 3)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged[1].running_var.lerp_(model[1].running_var * (1.001 if fault else 1), 0.5)
        averaged(x)


def train_with_a_bucket(fault):
    """ZeRO in small: gradients are copied into a bucket and added up there, and a flat parameter is updated."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    parameters = list(model.parameters())
    flat = nn.Parameter(torch.cat([it.detach().flatten() for it in parameters]))
    optimizer = torch.optim.SGD([flat], lr=0.1)
    for _ in range(2):
        model(own_rows(torch.randn(ROWS, 3))).square().mean().backward()
        flat.grad = torch.cat([it.grad.flatten() for it in parameters])
        average(flat.grad)
        optimizer.step()
        for parameter, values in zip(parameters, flat.detach().split([it.numel() for it in parameters]), strict=True):
            if not (fault and parameter is model[2].bias):
                parameter.data.copy_(values.view_as(parameter))
            parameter.grad = None


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (train_two_models, (1, "gradient", "model-2.bias", "missing sum")),
        (train_with_average_weights, (2, "activation", "model-2.1")),
        (train_with_a_bucket, (1, "parameter", "2.bias", "stale values")),
    ],
    ids=["two models", "evaluation", "bucket"],
)
def test_fault_is_found_where_it_is_and_none_where_none_is(run_ranks, tmp_path, train, expected):
    def recorded(name, fault):
        torch.manual_seed(0)
        with InFloat64(), record(tmp_path / name):
            train(fault)

    recorded("reference", False)
    run_ranks(lambda: recorded("right", False), 2)
    run_ranks(lambda: recorded("wrong", True), 2)

    report = compare(tmp_path / "reference", tmp_path / "right")
    assert report.agrees, report
    found = compare(tmp_path / "reference", tmp_path / "wrong").first
    assert found is not None
    assert (found.step, found.kind, found.name, found.fault)[: len(expected)] == expected
