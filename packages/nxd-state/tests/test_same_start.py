"""Ranks that hold the same weights and start with other values are noticed, and building alike prevents it."""

import pytest
import torch
from nxd_state import (
    active_group,
    all_reduce,
    check_same_start,
    initialize_model_parallel,
    one_random_state,
    rng_stream,
    seed_model_parallel,
    set_shard_spec,
    shard_along,
    subgroup,
)
from torch import nn


def _outcome(parameters, group=None):
    try:
        check_same_start(parameters, group)
    except ValueError as error:
        return str(error)
    return "same"


def _expert(value):
    parameter = nn.Parameter(torch.full((4, 2), float(value)))
    set_shard_spec(parameter, shard_along((8, 2), 0, rank=active_group("ep").rank, size=2, axis="ep"))
    parameter.expert_model_parallel = True
    return parameter


def _part(value, copies=1):
    parameter, size = nn.Parameter(torch.full((4, 2), float(value))), 2 // copies
    rank = active_group("tp").rank // copies
    set_shard_spec(parameter, shard_along((4 * size, 2), 0, rank=rank, size=size, copies=copies))
    return parameter


@pytest.mark.parametrize(
    ("degrees", "make", "differing"),
    [
        ({"tensor_model_parallel_size": 1}, lambda rank: nn.Parameter(torch.tensor(1.0 + 1e-7 * rank)), "dp+cp"),
        ({"context_parallel_size": 2}, lambda rank: nn.Parameter(torch.arange(7.0).roll(rank)).bfloat16(), "dp+cp"),
        ({"tensor_model_parallel_size": 2}, lambda rank: nn.Parameter(torch.ones(3) * rank), "tp"),
        ({"tensor_model_parallel_size": 2}, _part, None),
        ({"tensor_model_parallel_size": 2}, lambda rank: _part(rank, copies=2), "tp"),
        ({"pipeline_model_parallel_size": 2}, lambda rank: nn.Parameter(torch.ones(3 + rank) * rank), None),
        ({"expert_model_parallel_size": 2}, _expert, None),
        ({"tensor_model_parallel_size": 2}, lambda rank: nn.Parameter(torch.empty(3, device="meta")), None),
    ],
)
def test_weights_of_another_value_are_noticed_where_ranks_hold_the_same(run_ranks, degrees, make, differing):
    def outcome():
        initialize_model_parallel(**degrees)
        rank = torch.distributed.get_rank()
        return _outcome(
            [nn.Parameter(torch.ones(2)) if "pipeline_model_parallel_size" not in degrees else make(rank), make(rank)]
        )

    first, second = run_ranks(outcome, 2)
    assert first == second
    if differing is None:
        assert first == "same"
    else:
        assert first.startswith("ranks 0 and 1 start from different weights: parameter 1 of shape")
        assert repr(differing) in first
        assert "torch.manual_seed(seed)" in first


def test_difference_in_one_group_is_an_error_on_every_rank(run_ranks):
    def outcome():
        initialize_model_parallel(2)
        rank = torch.distributed.get_rank()
        of_all = _outcome([nn.Parameter(torch.full((2,), float(rank == 3)))])
        return of_all, _outcome([nn.Parameter(torch.full((2,), float(rank // 2)))], subgroup("tp", 2))

    outcomes = run_ranks(outcome, 4)
    assert len({of_all for of_all, _ in outcomes}) == 1
    assert "ranks 1 and 3" in outcomes[0][0]
    assert {of_group for _, of_group in outcomes} == {"same"}


@pytest.mark.parametrize("seed", ["none", "alike", "by_replica", "streams"])
def test_models_are_drawn_alike_however_ranks_are_seeded(run_ranks, seed):
    def drawn():
        initialize_model_parallel(2)
        if seed == "alike":
            torch.manual_seed(3)
        elif seed == "by_replica":
            torch.manual_seed(3 + active_group("dp").rank)
        elif seed == "streams":
            seed_model_parallel(3)
            with rng_stream("tp"):
                own = torch.get_rng_state()
        else:
            torch.manual_seed(torch.distributed.get_rank())
        before = torch.get_rng_state()
        with one_random_state():
            weights = torch.rand(3)
        kept = torch.equal(before, torch.get_rng_state())
        if seed == "streams":
            with rng_stream("tp"):
                kept = kept and torch.equal(own, torch.get_rng_state())
        return weights.tolist(), kept, torch.rand(3).tolist()

    weights, kept, afterwards = zip(*run_ranks(drawn, 4), strict=True)
    assert weights == (weights[0],) * 4
    assert afterwards[0] == afterwards[1]  # one replica's ranks drop alike
    assert (afterwards[0] == afterwards[2]) == (seed == "alike")
    assert set(kept) == {seed in ("by_replica", "streams")}
    if seed in ("alike", "by_replica", "none"):
        torch.manual_seed(0 if seed == "none" else 3)
        assert torch.rand(3).tolist() == weights[0]


class _Tower(nn.Module):
    """A layer that tensor-parallel ranks split, and one that is whole on each."""

    def __init__(self):
        super().__init__()
        self.split, self.whole = _part(active_group("tp").rank), nn.Linear(3, 3)

    def forward(self):
        of_all_ranks = all_reduce(self.split.detach().sum(), active_group("tp"))
        return of_all_ranks + self.split.sum() + self.whole(torch.ones(3)).sum()

    def step(self, optimizer):
        self().backward()
        optimizer.step()


def _optimizers(model):
    return {
        "one": [torch.optim.SGD(model.parameters(), lr=0.1)],
        "warm-up": [torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.0))],
        "of split weights alone": [torch.optim.SGD([model.split], lr=0.1)],
        "of a plain model": [torch.optim.SGD(model.whole.parameters(), lr=0.1)],
    }


@pytest.mark.parametrize("kind", ["one", "warm-up", "of split weights alone", "of a plain model"])
def test_second_step_of_an_optimizer_of_torch_compares_whole_weights_of_tensor_parallel_ranks(run_ranks, kind):
    def outcome():
        initialize_model_parallel(2)
        torch.manual_seed(torch.distributed.get_rank())
        model = _Tower()
        (optimizer,) = _optimizers(model)[kind]
        if kind == "warm-up":
            for _ in range(2):  # at a rate of zero, which changes nothing: a checkpoint may be loaded afterwards
                model.step(optimizer)
            optimizer.param_groups[0]["lr"].fill_(0.1)
        model.step(optimizer)
        try:
            model.step(optimizer)
        except ValueError as error:
            model.step(optimizer)
            return str(error)
        return "same"

    first, second = run_ranks(outcome, 2)

    assert first == second
    if kind in ("one", "warm-up"):
        assert first.startswith("ranks 0 and 1 start from different weights: parameter 1 of shape (3, 3)")
    else:
        assert first == "same"


@pytest.mark.parametrize("alike", [True, False])
def test_rank_whose_grad_scaler_skips_its_first_step_is_not_waited_for(run_ranks, alike):
    def errors():
        initialize_model_parallel(2)
        rank = torch.distributed.get_rank()
        torch.manual_seed(0 if alike else rank)
        model = _Tower()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1.0)
        raised = []
        for step in range(4):
            scaler.scale(model()).backward()
            if step == 0 and rank == 0:
                model.split.grad.fill_(torch.inf)
            try:
                scaler.step(optimizer)
            except ValueError as error:
                raised.append(str(error))
            scaler.update()
            optimizer.zero_grad()
        return raised

    first, second = run_ranks(errors, 2)

    assert first == second
    assert [it.partition(":")[0] for it in first] == ([] if alike else ["ranks 0 and 1 start from different weights"])


def test_first_steps_are_not_compared_without_tensor_parallel_ranks(run_ranks):
    def step_on_one_rank_alone():
        initialize_model_parallel(1)
        model = _Tower()
        if torch.distributed.get_rank() == 0:
            model.step(torch.optim.SGD(model.parameters(), lr=0.1))

    run_ranks(step_on_one_rank_alone, 2)
