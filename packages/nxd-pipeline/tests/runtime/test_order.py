"""Schedules of any method and size, and any order that a user may give: verified, simulated and played alike."""

import random
from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nxd_pipeline.partition import Stage, Wiring
from nxd_pipeline.runtime import Executor, P2PCommunicator
from nxd_pipeline.schedules import (
    SCHEDULE_NAMES,
    Action,
    ActionKind,
    custom_schedule,
    insert_communication,
    make_schedule,
    simulate,
    verify_schedule,
)
from nxd_state import get_group, initialize_model_parallel
from torch import nn

F, B, I, W = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
STAGES_PER_RANK = {"1f1b": [1], "zb-h1": [1], "zb-v": [2], "dualpipe-v": [2]}
MESSAGES_FOR = {F: ActionKind.RECV_ACTIVATION, B: ActionKind.RECV_GRADIENT, I: ActionKind.RECV_GRADIENT}


def any_order(pipeline_size, stages_per_rank, num_microbatches, seed):
    """A schedule in which each rank takes at random what it could do next, and splits backwards at random."""
    choice = random.Random(seed)
    num_stages = pipeline_size * stages_per_rank
    placement = [*range(pipeline_size)] * stages_per_rank
    choice.shuffle(placement)
    ready = [Action(F, 0, microbatch) for microbatch in range(num_microbatches)]
    rows = [[] for _ in range(pipeline_size)]
    while ready:
        action = ready.pop(choice.randrange(len(ready)))
        rows[placement[action.stage]].append(action)
        stage, microbatch = action.stage, action.microbatch
        backward = choice.choice([B, I])
        if action.kind is F:
            is_last = stage == num_stages - 1
            ready.append(Action(backward, stage, microbatch) if is_last else Action(F, stage + 1, microbatch))
        elif action.kind in (B, I) and stage:
            ready.append(Action(backward, stage - 1, microbatch))
        if action.kind is I:
            ready.append(Action(W, stage, microbatch))
    return custom_schedule(rows)


def schedules(pipeline_size):
    number = st.integers(1, 6)
    named = st.sampled_from(SCHEDULE_NAMES).flatmap(
        lambda name: st.builds(
            lambda stages, number: make_schedule(name, pipeline_size, number, virtual_pipeline_size=stages),
            st.sampled_from(STAGES_PER_RANK.get(name, [1, 2, 3])),
            number,
        )
    )
    own = st.builds(any_order, st.just(pipeline_size), st.integers(1, 3), number, st.integers(0, 10**6))
    return st.one_of(named, own)


def inputs_of_microbatch(microbatch):
    return torch.linspace(0, microbatch, 6).view(2, 3).double()


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x):
        return torch.tanh(self.linear(x))


def play(schedule, group):
    """This rank's actions with their times, gradients and losses."""
    torch.manual_seed(0)
    modules = [Square() for _ in range(schedule.num_stages)]
    names = ["x", *(f"value {stage}" for stage in range(schedule.num_stages - 1))]
    outputs = [*((name,) for name in names[1:]), ()]
    wiring = Wiring([Stage(*it) for it in zip(modules, ((name,) for name in names), outputs, strict=True)])
    own = {stage: modules[stage] for stage in schedule.stages_of(group.rank)}
    executor = Executor(own, wiring, schedule, P2PCommunicator(group))
    spans = []
    losses = executor.run(
        group.rank,
        [{"x": inputs_of_microbatch(microbatch)} for microbatch in range(schedule.num_microbatches)],
        lambda output: output.sum(),
        record=lambda action, start, end: spans.append((action, start, end)),
    )
    gradients = {stage: [it.grad for it in module.parameters()] for stage, module in own.items()}
    return spans, gradients, losses


def play_all(batch):
    initialize_model_parallel(pipeline_model_parallel_size=batch[0].num_ranks)
    return [play(insert_communication(schedule), get_group("pp")) for schedule in batch]


def assert_played_as_simulated(schedule, by_rank):
    timeline = simulate(schedule)
    ends = {}
    for spans, simulated in zip(by_rank, timeline.compute_spans, strict=True):
        computed = [it for it in spans if not it[0].is_communication]
        assert [action for action, _, _ in computed] == [span.action for span in simulated]
        assert all(before[2] <= behind[1] for before, behind in pairwise(spans))
        ends |= {action: end for action, _, end in computed}
    for spans in by_rank:
        for action, start, _ in spans:  # all ranks are on one machine, and so on one clock
            for needed in inputs_of(action, schedule.num_stages):
                assert any(ends[it] <= start for it in needed if it in ends), action


def inputs_of(action, num_stages):
    stage, microbatch = action.stage, action.microbatch
    if action.kind is F and stage:
        yield [Action(F, stage - 1, microbatch)]
    if action.kind in (B, I) and stage < num_stages - 1:
        yield [Action(kind, stage + 1, microbatch) for kind in (B, I)]


def assert_waits_come_right_before_what_waits(spans):
    for (action, _, _), (following, _, _) in pairwise(spans):
        if action.kind in (ActionKind.RECV_ACTIVATION, ActionKind.RECV_GRADIENT):
            assert MESSAGES_FOR[following.kind] is action.kind
            assert (following.stage, following.microbatch) == (action.stage, action.microbatch)


def check_on(run_ranks, batch):
    for schedule in batch:
        verify_schedule(insert_communication(schedule))
    results = run_ranks(play_all, batch[0].num_ranks, batch)
    for schedule, by_rank in zip(batch, zip(*results, strict=True), strict=True):
        recorded = [spans for spans, _, _ in by_rank]
        assert_played_as_simulated(schedule, recorded)
        for spans, actions in zip(recorded, insert_communication(schedule).actions, strict=True):
            assert sorted(map(str, (it[0] for it in spans))) == sorted(map(str, actions))
            assert_waits_come_right_before_what_waits(spans)
        assert_gradients_of_one_process(schedule, by_rank)


def assert_gradients_of_one_process(schedule, by_rank):
    torch.manual_seed(0)
    modules = nn.Sequential(*[Square() for _ in range(schedule.num_stages)])
    losses = []
    for microbatch in range(schedule.num_microbatches):
        loss = modules(inputs_of_microbatch(microbatch)).sum()
        losses.append(loss.detach())
        if not schedule.is_forward_only:
            (loss / schedule.num_microbatches).backward()
    for rank, (_, gradients, made) in enumerate(by_rank):
        assert_same(made, losses if rank == schedule.rank_of_stage[-1] else [])
        for stage, of_stage in gradients.items():
            expected = [parameter.grad for parameter in modules[stage].parameters()]
            assert_same(of_stage, expected)


def assert_same(tensors, expected):
    for one, other in zip(tensors, expected, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


FEW = settings(
    max_examples=3, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(st.lists(schedules(2), min_size=8, max_size=8))
def test_any_schedule_on_two_ranks_is_played_as_simulated(run_ranks, batch):
    check_on(run_ranks, batch)


@FEW
@given(st.lists(schedules(3), min_size=8, max_size=8))
def test_any_schedule_on_three_ranks_is_played_as_simulated(run_ranks, batch):
    check_on(run_ranks, batch)
