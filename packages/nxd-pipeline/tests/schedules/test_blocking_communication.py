"""Messages for a transport at which both ends wait for each other cost nothing where messages take no time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_pipeline.schedules import (
    SCHEDULE_NAMES,
    Edge,
    StageCost,
    custom_schedule,
    forward_only,
    insert_blocking_communication,
    insert_communication,
    make_schedule,
    simulate,
    verify_schedule,
)


def blocking_makespan(schedule, cost):
    """When the last rank is done if a message passes once both its ends have come to it, and both wait until then."""
    rows, clocks = [list(row) for row in schedule.actions], [0.0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while row and not row[0].is_communication:
                clocks[rank] += cost.of(row.pop(0).kind)
                progress = True
            if row:
                peer = schedule.rank_of_stage[row[0].peer]
                if rows[peer] and rows[peer][0] == row[0].counterpart():
                    clocks[rank] = clocks[peer] = max(clocks[rank], clocks[peer])
                    del row[0], rows[peer][0]
                    progress = True
    assert not any(rows)
    return max(clocks)


def computations(schedule):
    return [[action for action in row if not action.is_communication] for row in schedule.actions]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (2, 8), (4, 8), (8, 16)])
def test_schedule_takes_no_longer_than_where_messages_do_not_block(name, num_ranks, num_microbatches):
    schedule = make_schedule(name, num_ranks, num_microbatches)

    blocking = insert_blocking_communication(schedule)

    verify_schedule(blocking)
    assert computations(blocking) == computations(schedule)
    longer = blocking_makespan(blocking, StageCost()) / simulate(schedule).makespan
    assert 1.0 <= longer <= (1.06 if name == "dualpipe-v" else 1.0)


def test_1f1b_with_receives_posted_early_would_take_two_thirds_longer():
    schedule = make_schedule("1f1b", 8, 32)

    early = blocking_makespan(insert_communication(schedule), StageCost())

    assert early > 1.6 * blocking_makespan(insert_blocking_communication(schedule), StageCost())


@settings(deadline=None)
@given(st.data())
def test_any_edges_between_any_stages_give_a_schedule_that_can_be_played(data):
    num_stages = data.draw(st.integers(1, 5))
    pairs = [(producer, consumer) for consumer in range(num_stages) for producer in range(consumer)]
    drawn = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    edges = [Edge(*pair, needs_gradient=data.draw(st.booleans())) for pair in drawn]
    schedule = make_schedule(data.draw(st.sampled_from(["gpipe", "1f1b"])), num_stages, data.draw(st.integers(1, 4)))

    for computed in (schedule, forward_only(schedule)):
        verify_schedule(insert_blocking_communication(computed, edges), edges)


def test_order_that_waits_for_ever_is_refused():
    with pytest.raises(ValueError, match="what they wait for comes after them or is missing"):
        insert_blocking_communication(custom_schedule([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]]))
