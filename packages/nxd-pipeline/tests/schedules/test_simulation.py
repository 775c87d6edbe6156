"""Times by hand and by formula; F, I and W are what forward and both halves of a backward take."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_pipeline.schedules import Costs, StageCost, custom_schedule, make_schedule, simulate

EQUAL = StageCost()
UNEQUAL = StageCost(forward=1.0, backward_input=1.25, backward_weight=0.75)


def cost_of_a_stage(stages_per_rank, of_rank=EQUAL):
    """The cost of each of several stages that share what is one stage elsewhere."""
    return Costs(
        StageCost(
            forward=of_rank.forward / stages_per_rank,
            backward_input=of_rank.backward_input / stages_per_rank,
            backward_weight=of_rank.backward_weight / stages_per_rank,
        )
    )


@pytest.mark.pairs
@pytest.mark.parametrize("cost", [EQUAL, UNEQUAL])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("size", "number"), [(1, 1), (2, 1), (2, 5), (4, 2), (4, 8), (16, 64)])
def test_simulate_gpipe_and_1f1b_have_the_known_bubble(name, size, number, cost):
    timeline = simulate(make_schedule(name, size, number), Costs(cost))

    assert timeline.bubble_fraction == pytest.approx((size - 1) / (number + size - 1))
    assert timeline.makespan == pytest.approx(3 * (number + size - 1))


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
@pytest.mark.parametrize(("size", "number"), [(2, 4), (4, 4), (4, 7), (4, 9), (8, 12), (8, 32), (3, 10)])
def test_simulate_interleaved_divides_the_bubble_by_stages_per_rank(size, number, stages_per_rank):
    schedule = make_schedule("interleaved", size, number, virtual_pipeline_size=stages_per_rank)

    timeline = simulate(schedule, cost_of_a_stage(stages_per_rank))

    assert timeline.makespan == pytest.approx(3 * (number + (size - 1) / stages_per_rank))


@pytest.mark.parametrize("cost", [EQUAL, UNEQUAL])
@pytest.mark.parametrize(("size", "number"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8), (8, 64)])
def test_simulate_zb_h1_has_the_bubble_of_the_paper(size, number, cost):
    timeline = simulate(make_schedule("zb-h1", size, number), Costs(cost))

    bubble = (size - 1) * (cost.forward + cost.backward_input - cost.backward_weight)
    assert timeline.makespan == pytest.approx(3 * number + bubble)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("name", "least"), [("zb-v", lambda size: 2 * size - 1), ("dualpipe-v", lambda size: 2 * size)]
)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_simulate_v_shaped_schedules_only_wait_for_the_first_microbatch(name, least, size, more):
    number = least(size) + more

    timeline = simulate(make_schedule(name, size, number), cost_of_a_stage(2))

    assert timeline.makespan == pytest.approx(3 * number + (size - 1) / 2)


def test_simulate_zb_v_computes_all_the_time_once_a_rank_has_begun():
    timeline = simulate(make_schedule("zb-v", 4, 16))

    for spans in timeline.spans:
        assert all(span.end == following.start for span, following in pairwise(spans))


def test_simulate_unequal_stages_and_slow_links_gives_the_times_counted_by_hand():
    schedule = make_schedule("1f1b", 2, 2)
    stages = (StageCost(2, 1, 1, output_bytes=100), StageCost(3, 2, 2, backward=3))

    timeline = simulate(schedule, Costs(stages, latency=0.5, bytes_per_time=200))

    assert [[(str(span.action), span.start, span.end) for span in spans] for spans in timeline.spans] == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 10, 12), ("0B1", 16, 18)],
        [("1F0", 3, 6), ("1B0", 6, 9), ("1F1", 9, 12), ("1B1", 12, 15)],
    ]
    assert (timeline.makespan, timeline.bubble_fraction) == (18, pytest.approx(1 - (8 + 12) / 36))


def test_simulate_with_messages_waits_for_sends_and_receives_where_they_stand():
    rows = ["0F0 0F1 0SA0>1 0SA1>1", "1RA0<0 1F0 1RA1<0 1F1"]
    schedule = custom_schedule([row.split() for row in rows])

    timeline = simulate(schedule, Costs(latency=1))

    assert [[(str(span.action), span.start, span.end) for span in spans] for spans in timeline.spans] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0SA0>1", 2, 3), ("0SA1>1", 2, 5)],
        [("1RA0<0", 0, 3), ("1F0", 3, 4), ("1RA1<0", 4, 5), ("1F1", 5, 6)],
    ]


COST = st.sampled_from([0.5, 1.0, 1.5, 2.0])


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_simulate_any_costs_takes_at_least_each_ranks_work_and_one_microbatch(draw_computation, data):
    schedule = draw_computation(data)
    stages = tuple(data.draw(st.builds(StageCost, COST, COST, COST)) for _ in schedule.rank_of_stage)

    timeline = simulate(schedule, Costs(stages, latency=data.draw(COST)))

    work = [
        sum(stages[action.stage].of(action.kind) for action in actions if not action.is_communication)
        for actions in schedule.actions
    ]
    assert timeline.makespan >= max(work)
    assert timeline.makespan >= sum(stage.forward for stage in stages)
    assert timeline.bubble_fraction == pytest.approx(1 - sum(work) / (timeline.makespan * len(work)))


def test_zero_bubble_schedules_beat_1f1b_where_backwards_split_evenly():
    names = ["1f1b", "interleaved", "zb-h1", "zb-v"]
    schedules = [make_schedule(name, 4, 8) for name in names]

    makespans = [simulate(it, cost_of_a_stage(it.num_stages // it.num_ranks)).makespan for it in schedules]

    assert makespans == sorted(makespans, reverse=True)
    assert len(set(makespans)) == len(makespans)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0B0 0F0", r"rank 0, position 0 \(0B0\): 0F0 has to come before it"),
        ("0F0 0SA0>1|1F0", r"rank 1, position 0 \(1F0\): 1RA0<0 has to come before it"),
        (
            "0F0|1RA0<0 1F0",
            r"rank 1, position 1 \(1F0\) waits for 1RA0<0: what they wait for comes after them or is miss",
        ),
        ("0F0 0SA0>1 0SA0>1|1F0 1RA0<0", r"1RA0<0 has to come before it"),
        ("0F0 0SA0>1|1RA0<0 1F0 1RG0<2|2F0", r"rank 2, position 0 \(2F0\): 2RA0<1 has to come before it"),
    ],
)
def test_simulate_of_what_cannot_be_played_raises(rows, message):
    with pytest.raises(ValueError, match=message):
        simulate(custom_schedule([row.split() for row in rows.split("|")]))


def test_simulate_with_costs_of_other_stages_raises():
    with pytest.raises(ValueError, match="1 costs for a schedule of 2 stages; pass one for each, or one for all"):
        simulate(make_schedule("1f1b", 2, 2), Costs((StageCost(),)))
