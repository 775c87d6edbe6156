"""A small model without layers, in any layout, and its training on one process.

Its loss is a sum over elements, so that every shard can compute its own part of it, and it has all kinds of
parameters: split by rows or columns, padded, whole, in a sequence-parallel region, prime-sized, smaller than DP.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from nxd_state import active_group, set_shard_spec, shard_along
from nxd_testing import assemble_logical, logical_pieces
from torch import nn

SHAPES = {
    "column": (8, 5),
    "vocabulary": (10, 3),
    "row": (5, 8),
    "prime": (13,),
    "sequence_parallel": (11,),
    "bias": (3,),
    "scale": (),
}
MICROBATCHES = 3
STEPS = 20


def spec_of(name):
    """None: whole on every tensor-parallel rank."""
    tp = active_group("tp")
    here = {"rank": tp.rank, "size": tp.size}
    specs = {
        "column": lambda: shard_along(SHAPES["column"], 0, **here),
        "vocabulary": lambda: shard_along(SHAPES["vocabulary"], 0, padded_length=12, **here),
        "row": lambda: shard_along(SHAPES["row"], 1, **here),
    }
    return specs[name]() if name in specs else None


def local_part(name, whole):
    spec = spec_of(name)
    if spec is None:
        return whole.clone()
    part = torch.zeros(spec.local_shape, dtype=whole.dtype)
    spec.copy_from_logical(whole, part)
    return part


def logical_weights(dtype):
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def coefficients(name, step, microbatch, sample, dtype):
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + 10 * sample + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def make_parameters(dtype=torch.float64):
    """This rank's part of the model, by name."""
    parameters = {}
    for name, whole in logical_weights(dtype).items():
        parameter = nn.Parameter(local_part(name, whole))
        spec = spec_of(name)
        if spec is not None:
            set_shard_spec(parameter, spec)
        parameter.sequence_parallel_enabled = name == "sequence_parallel"
        parameters[name] = parameter
    return parameters


def loss_of(parameters, step, microbatch, samples, names=tuple(SHAPES)):
    """The mean over samples; in a sequence-parallel region each rank has seen its part of the sequence only."""
    tp = active_group("tp")
    total = 0.0
    for name in names:
        for sample in samples:
            factor = local_part(name, coefficients(name, step, microbatch, sample, parameters[name].dtype))
            part = (parameters[name] * factor - 1).square() * (factor != 0)
            if parameters[name].sequence_parallel_enabled:
                part = part * (2 * (tp.rank + 1) / (tp.size * (tp.size + 1)))  # parts that add up to 1
            total = total + part.sum() / len(samples)
    return total


def grouped(parameters):
    """Two groups with settings of their own."""
    matrices = [p for p in parameters.values() if p.dim() > 1]
    rest = [p for p in parameters.values() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.05, "weight_decay": 0.0}]


def optimizer_arguments(name):
    return {
        "AdamW": (torch.optim.AdamW, {"lr": 0.02}),
        "fused AdamW": (torch.optim.AdamW, {"lr": 0.02, "fused": True}),
        "SGD": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    }[name]


@dataclass
class Trained:
    weights: dict
    norms: list


def train_on_one_process(optimizer_name, *, max_norm=None, num_samples=4, dtype=torch.float64, steps=STEPS):
    """What the parallel run has to equal: torch's own optimizer and clipping, all samples in each microbatch."""
    parameters = make_parameters(dtype)
    optimizer_class, arguments = optimizer_arguments(optimizer_name)
    optimizer = optimizer_class(grouped(parameters), **arguments)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    norms = []
    for step in range(steps):
        for microbatch in range(MICROBATCHES):
            (loss_of(parameters, step, microbatch, range(num_samples)) / MICROBATCHES).backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), max_norm)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return Trained(assemble_logical([pieces(parameters)]), norms)


def take_step(optimizer, parameters, step, *, overlap=True, num_samples=4):
    """One step of the parallel run: this replica's samples of each microbatch."""
    replicas = active_group("dp", "cp")
    samples = range(num_samples)[replicas.rank :: replicas.size]
    for microbatch in range(MICROBATCHES - 1):
        (loss_of(parameters, step, microbatch, samples) / MICROBATCHES).backward()
    last = loss_of(parameters, step, MICROBATCHES - 1, samples) / MICROBATCHES
    if overlap:
        with optimizer.overlap_backward():
            last.backward()
    else:
        last.backward()
    optimizer.step()
    optimizer.zero_grad()


def pieces(parameters):
    return logical_pieces((name, p, p) for name, p in parameters.items())


@pytest.fixture
def small_model():
    """The functions above, for tests and for what they run on ranks."""
    return SimpleNamespace(
        make_parameters=make_parameters,
        grouped=grouped,
        loss_of=loss_of,
        take_step=take_step,
        pieces=pieces,
        assemble=assemble_logical,
        optimizer_arguments=optimizer_arguments,
        train_on_one_process=train_on_one_process,
        steps=STEPS,
    )
