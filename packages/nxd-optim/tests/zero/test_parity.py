"""Training with ZeRO-1 equals torch's optimizer on one process with the whole batch."""

import pytest
import torch
from nxd_optim.zero import NeuronZero1Optimizer
from nxd_state import initialize_model_parallel

pytestmark = pytest.mark.smoke

# 209 bytes hold a few of the model's parameters, so that there are several buckets.
TINY_BUCKETS = {"bucket_cap_mb_reduce_scatter": 0.0002}

# Optimizer, max_norm, whether the gradients leave during backward, and arguments.
CASES = [
    ("AdamW", None, True, TINY_BUCKETS),
    ("fused AdamW", 2.0, True, {}),
    ("SGD", 2.0, False, TINY_BUCKETS),
    ("SGD", None, True, {}),
]


def train(small_model, optimizer_name, max_norm, overlap, arguments):
    parameters = small_model.make_parameters()
    optimizer_class, defaults = small_model.optimizer_arguments(optimizer_name)
    optimizer = NeuronZero1Optimizer(
        small_model.grouped(parameters),
        optimizer_class,
        grad_clipping=max_norm is not None,
        max_norm=max_norm,
        **arguments,
        **defaults,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, small_model.steps)
    norms = []
    for step in range(small_model.steps):
        small_model.take_step(optimizer, parameters, step, overlap=overlap)
        schedule.step()
        norms.append(optimizer.grad_norm)
    return small_model.pieces(parameters), [float(norm) for norm in norms if norm is not None]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_training_equals_the_unsharded_optimizer(run_ranks, small_model, ranks, tp):
    def train_all():
        initialize_model_parallel(tp)
        return [train(small_model, *case) for case in CASES]

    results = run_ranks(train_all, ranks)

    for index, (optimizer_name, max_norm, _, _) in enumerate(CASES):
        expected = small_model.train_on_one_process(optimizer_name, max_norm=max_norm)
        found = small_model.assemble([of_rank[index][0] for of_rank in results])
        assert found.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-14)
        for of_rank in results:
            assert of_rank[index][1] == pytest.approx(expected.norms, rel=1e-12)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bucket_cap_mb_all_gather": 0.0001},
        {"use_grad_acc_hook": True, "higher_cc_precision": True},
        {"sharding_groups": [[0, 1, 2, 3]], "grad_norm_groups": [[0], [1], [2], [3]]},
    ],
    ids=["buckets by all-gather", "higher precision", "lists of ranks"],
)
def test_training_with_other_arguments_equals_the_unsharded_optimizer(run_ranks, small_model, arguments):
    def train_group():
        initialize_model_parallel()
        parameters = small_model.make_parameters()
        optimizer = NeuronZero1Optimizer(small_model.grouped(parameters), torch.optim.AdamW, lr=0.02, **arguments)
        size = optimizer.group.size
        for step in range(5):
            samples = range(4)[optimizer.group.rank :: size]
            small_model.loss_of(parameters, step, 0, samples).backward()
            optimizer.step()
            optimizer.zero_grad()
        return small_model.pieces(parameters)

    results = run_ranks(train_group, 4)

    parameters = small_model.make_parameters()
    expected = torch.optim.AdamW(small_model.grouped(parameters), lr=0.02)
    for step in range(5):
        small_model.loss_of(parameters, step, 0, range(4)).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        expected.step()
        expected.zero_grad()
    wholes = small_model.assemble([small_model.pieces(parameters)])
    for name, weight in small_model.assemble(results).items():
        torch.testing.assert_close(weight, wholes[name], rtol=1e-12, atol=1e-14)
