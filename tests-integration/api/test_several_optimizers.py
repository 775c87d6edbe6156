"""`run_train` beside what scripts do between steps: drop gradients, make a new optimizer, or have two; tied weights."""

import neuronx_distributed as nxd
import pytest
import torch
from nxd_state import get_group
from torch import nn
from torch.nn import functional as F


class Layer(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class Model(nn.Module):
    """Its head is its table; with `skips` one layer is used where the data-parallel rank is 1 only."""

    def __init__(self, dtype=torch.float64, skips=False):
        super().__init__()
        self.table = nn.Embedding(10, 8, dtype=dtype)
        self.layers = nn.ModuleList(Layer(8, 8, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False, dtype=dtype)
        self.head.weight = self.table.weight
        self.skips = skips

    def forward(self, ids, labels):
        x = self.table(ids)
        for index, layer in enumerate(self.layers):
            if not (self.skips and index == 1 and get_group("dp").rank == 0):
                x = layer(x)
        return F.cross_entropy(self.head(x).double(), labels)


def config_of(*, pp=1, zero1=False):
    pipeline = {
        "num_microbatches": 2,
        "auto_partition": True,
        "transformer_layer_cls": Layer,
        "input_names": ["ids", "labels"],
    }
    return nxd.neuronx_distributed_config(
        pipeline_parallel_size=pp,
        pipeline_config=pipeline,
        optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False},
    )


def make(config, **options):
    torch.manual_seed(0)
    return nxd.initialize_parallel_model(config, Model, **options)


def sgd(config, parameters):
    return nxd.initialize_parallel_optimizer(config, torch.optim.SGD, parameters, lr=1.0)


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 5, (4,), generator=generator), torch.randint(5, 10, (4,), generator=generator)


def table_after_a_step(pp, dtype, zero1):
    config = config_of(pp=pp, zero1=zero1)
    model = make(config, dtype=dtype)
    optimizer = sgd(config, model.parameters())
    model.run_train(*batch())
    optimizer.step()
    model.pipeline.synchronize_tied_weights()
    return next(weight for name, weight in model.named_parameters() if weight.shape == (10, 8)).detach().clone()


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tied_weights_of_two_stages_get_the_gradient_of_one_process(run_ranks, dtype, zero1):
    (expected,) = run_ranks(table_after_a_step, 1, 1, dtype, zero1)

    for table in run_ranks(table_after_a_step, 2, 2, dtype, zero1):
        rtol, atol = (1e-10, 1e-12) if dtype is torch.float64 else (2e-2, 2e-3)
        torch.testing.assert_close(table, expected, rtol=rtol, atol=atol)


def movement(act, zero1):
    """By how much a step moves the weights after `act(config, model, optimizer)`, which returns the optimizer."""
    config = config_of(zero1=zero1)
    model = make(config)
    optimizer = act(config, model, sgd(config, model.parameters()))
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer.step()
    return max((weight - old).abs().max().item() for weight, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero1", [False, True])
def test_gradients_dropped_after_run_train_are_not_applied(run_ranks, zero1, set_to_none):
    def drop(config, model, optimizer):
        model.run_train(*batch())
        optimizer.zero_grad(set_to_none=set_to_none)
        return optimizer

    assert run_ranks(movement, 2, drop, zero1) == [0.0, 0.0]


@pytest.mark.parametrize("zero1", [False, True])
def test_new_optimizer_of_the_same_weights_trains_them_while_the_old_one_lives(run_ranks, zero1):
    kept = []

    def renew(config, model, optimizer):
        kept.append(optimizer)
        new = sgd(config, model.parameters())
        model.run_train(*batch())
        return new

    moved = run_ranks(movement, 2, renew, zero1)

    assert moved[0] == moved[1] > 0.01


def gradients(world_size_is_two):
    config = config_of()
    model = make(config, skips=world_size_is_two)
    layers = list(model.layers.parameters() if hasattr(model, "layers") else model.module.layers.parameters())
    others = [weight for weight in model.parameters() if all(weight is not layer for layer in layers)]
    optimizers = [sgd(config, layers[2:]), sgd(config, [*layers[:2], *others])]
    model.run_train(*batch())
    assert len(optimizers) == 2
    return {name: weight.grad for name, weight in model.named_parameters()}


def test_two_optimizers_average_the_same_where_ranks_use_different_layers(run_ranks):
    def plain(rank_skips):
        torch.manual_seed(0)
        model = Model()
        if rank_skips:
            model.layers[1] = nn.Identity()
        loss = F.cross_entropy(model.head(model.layers[1](model.layers[0](model.table(batch()[0])))), batch()[1])
        loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    skipping, using = plain(True), plain(False)
    expected = {name: (skipping[name] + grad) / 2 if name in skipping else grad / 2 for name, grad in using.items()}

    for found in run_ranks(gradients, 2, True):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
