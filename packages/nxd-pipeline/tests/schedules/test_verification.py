"""Schedules that break a rule are refused, and the message says where and what."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nxd_pipeline.schedules import (
    SCHEDULE_NAMES,
    Dataflow,
    Edge,
    custom_schedule,
    insert_communication,
    make_schedule,
    verify_schedule,
)

TRAINING = tuple(name for name in SCHEDULE_NAMES if name != "inference")


def with_row(schedule, rank, row):
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))


def draw_place(data, schedule):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1), label="rank")
    return rank, data.draw(st.integers(0, len(schedule.actions[rank]) - 1), label="position")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_verify_schedule_without_any_one_action_raises(draw_schedule, data):
    schedule = draw_schedule(data)
    rank, position = draw_place(data, schedule)
    row = schedule.actions[rank]
    broken = with_row(schedule, rank, row[:position] + row[position + 1 :])
    assume(broken.actions[0] and broken.is_forward_only == schedule.is_forward_only)

    with pytest.raises(ValueError, match=r"missing|has to come before it|wait forever|has no messages"):
        verify_schedule(broken)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_verify_schedule_with_any_action_twice_raises(draw_schedule, data):
    schedule = draw_schedule(data)
    rank, position = draw_place(data, schedule)
    row = schedule.actions[rank]
    again = data.draw(st.integers(position, len(row)))

    with pytest.raises(ValueError, match=rf"{row[position]} is at position {position} already; leave one of them out"):
        verify_schedule(with_row(schedule, rank, (*row[:again], row[position], *row[again:])))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_verify_schedule_with_an_action_before_what_it_needs_raises(draw_schedule, data):
    schedule = draw_schedule(data, TRAINING)
    rank, position = draw_place(data, schedule)
    row, dataflow = list(schedule.actions[rank]), Dataflow(schedule)
    needed = {it for choice in dataflow.local_inputs(row[position]) for it in choice}.union(
        dataflow.receives(row[position])
    )
    earlier = [place for place, action in enumerate(row) if action in needed]
    assume(earlier)
    other = data.draw(st.sampled_from(earlier))

    row[position], row[other] = row[other], row[position]

    with pytest.raises(ValueError, match=r"has to come before it"):
        verify_schedule(with_row(schedule, rank, row))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_verify_schedule_with_messages_crossed_at_one_end_raises(draw_schedule, data):
    schedule = draw_schedule(data, TRAINING)
    assume(schedule.num_ranks > 1)
    rank, position = draw_place(data, schedule)
    row = list(schedule.actions[rank])

    def way(action):
        return action.kind[0], action.peer is not None and schedule.rank_of_stage[action.peer]

    same_way = [
        place
        for place in range(position + 1, len(row))
        if row[position].peer is not None and row[place].peer is not None and way(row[place]) == way(row[position])
    ]
    assume(same_way)
    other = data.draw(st.sampled_from(same_way))

    row[position], row[other] = row[other], row[position]

    with pytest.raises(ValueError, match=r"wait forever|has to come before it"):
        verify_schedule(with_row(schedule, rank, row))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["0F0 0SA0>1 0RG0<1 0B0", "1F0 1RA0<0 1B0 1SG0>0"],
            r"schedule 'custom', rank 1, position 0 \(1F0\): 1RA0<0 has to come before it",
        ),
        (
            ["0F0 0SA0>1 0B0 0RG0<1", "1RA0<0 1F0 1B0 1SG0>0"],
            r"rank 0, position 2 \(0B0\): 0RG0<1 has to come before it",
        ),
        (
            ["0F0 0SA0>1 0RG0<1 0B0", "1RA0<0 1F0 1SG0>0 1B0"],
            r"rank 1, position 2 \(1SG0>0\): 1B0 or 1I0 has to come before it",
        ),
        (["1F0 0F0"], r"rank 0, position 0 \(1F0\): 0F0 has to come before it"),
        (["0F0 1F0 0B0 1B0"], r"rank 0, position 2 \(0B0\): 1B0 or 1I0 has to come before it"),
        (["0F0 1F0 1B0 0I0"], r"rank 0: 0B0 or 0W0 is missing"),
        (["0SA0>1 0F0", "1RA0<0 1F0"], r"rank 0, position 0 \(0SA0>1\): 0F0 has to come before it"),
        (
            ["0F0 0SA0>1 0RG0<1 0W0 0I0", "1RA0<0 1F0 1B0 1SG0>0"],
            r"rank 0, position 3 \(0W0\): 0I0 has to come before it",
        ),
        (
            ["0F0 0SA0>1 0RG0<1 0I0 0B0", "1RA0<0 1F0 1B0 1SG0>0"],
            r"rank 0, position 4 \(0B0\): 0I0 is at position 3 already; leave one of them out",
        ),
        (["0F0 0SA0>1 0RG0<1 0I0", "1RA0<0 1F0 1B0 1SG0>0"], "schedule 'custom', rank 0: 0B0 or 0W0 is missing"),
        (["0F0 0SA0>1", "1RA0<0 1F0 1B0"], "rank 0: 0B0 or 0I0 is missing"),
        (["0F0 0SA0>1 0RG0<1 0B0", "1RA0<0 1F0 1B0"], "rank 1: 1SG0>0 is missing"),
        (["0F0 0F1 0SA0>1 0SA1>1", "1RA0<0 1F0"], r"rank 1: 1F1 is missing"),
        (["0F0 0B0", "1F0 1B0"], r"has no messages; insert_communication\(schedule\) adds them"),
        (["0F0 0SA0>1 0SG0>1", "1RA0<0 1F0"], r"position 2 \(0SG0>1\): no such message is needed"),
        (["0F0 0SA0>1 1RA0<0 1F0"], r"position 1 \(0SA0>1\): no such message is needed"),
    ],
)
def test_verify_schedule_of_what_breaks_a_rule_raises_naming_the_place(rows, message):
    with pytest.raises(ValueError, match=message):
        verify_schedule(custom_schedule([row.split() for row in rows]))


@pytest.mark.parametrize(
    ("rows", "stops"),
    [
        # Both ranks send first, which only works where sends do not block.
        (
            ["0F0 0SA0>1 0F1 0SA1>1 0RG0<1 0B0 0RG1<1 0B1", "1RA0<0 1F0 1B0 1SG0>0 1RA1<0 1F1 1B1 1SG1>0"],
            ["rank 0, position 3 (0SA1>1)", "rank 1, position 3 (1SG0>0)"],
        ),
        # The other end takes them in another order.
        (
            ["0F0 0SA0>1 0F1 0SA1>1 0RG0<1 0RG1<1 0B0 0B1", "1RA1<0 1RA0<0 1F0 1F1 1B0 1SG0>0 1B1 1SG1>0"],
            ["rank 0, position 1 (0SA0>1)", "rank 1, position 0 (1RA1<0)"],
        ),
    ],
    ids=["both_send_first", "crossed"],
)
def test_verify_schedule_of_messages_that_never_meet_raises_naming_both_ends(rows, stops):
    message = "wait forever at these messages.*: " + "; ".join(
        rf"schedule 'custom', {re.escape(stop)}" for stop in stops
    )

    with pytest.raises(ValueError, match=message):
        verify_schedule(custom_schedule([row.split() for row in rows]))


def test_verify_schedule_mixing_whole_and_split_backwards_gives_what_each_rank_keeps():
    schedule = custom_schedule([["0F0", "0F1", "0B0", "0I1", "0W1"], ["1F0", "1I0", "1F1", "1B1", "1W0"]])

    assert verify_schedule(insert_communication(schedule)) == (2, 2)


def test_verify_schedule_with_an_edge_of_its_own_asks_for_its_messages():
    edges = [Edge(0, 1), Edge(1, 2), Edge(0, 2)]
    chained = insert_communication(make_schedule("1f1b", 3, 2))

    with pytest.raises(ValueError, match=r"rank 0, position .* \(0B0\): 0RG0<2 has to come before it"):
        verify_schedule(chained, edges)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (
            2,
            r"schedule '1f1b', rank 0, position 4 \(0F2\): this rank keeps 3 activations here, at most 3",
        ),
        ([3, 1, 1], r"rank 1, position .* \(1F1\): this rank keeps 2 activations here, at most 2, but max_in_flight=1"),
        ([3, 2], r"max_in_flight=\[3, 2\] is for 2 ranks; expected 3"),
    ],
)
def test_verify_schedule_that_keeps_too_much_raises(bound, message):
    with pytest.raises(ValueError, match=message):
        verify_schedule(insert_communication(make_schedule("1f1b", 3, 8)), max_in_flight=bound)
