"""Messages that are added to an order of computation, for chains of stages and for any other edges."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_pipeline.schedules import (
    SENDS,
    Costs,
    Dataflow,
    Edge,
    chain,
    custom_schedule,
    format_schedule,
    insert_communication,
    make_schedule,
    simulate,
    verify_schedule,
)


def draw_edges(data, num_stages):
    """A chain, of which some links may carry no gradient or be missing, and some skips."""
    pairs = [(producer, consumer) for consumer in range(num_stages) for producer in range(consumer)]
    skips = data.draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    links = data.draw(st.sets(st.sampled_from([(edge.producer, edge.consumer) for edge in chain(num_stages)])))
    return [Edge(*pair, needs_gradient=data.draw(st.booleans())) for pair in links.union(skips)]


def plays_in_batches(schedule, dataflow):
    """Plays neighbouring messages as one batch, a batch after the other on each rank; tells whether it ends.

    Computations do not wait for sends, and for their own receives only. A message passes once both ends are in the
    batch that its rank is at.
    """
    queues = [
        [list(run) for is_message, run in groupby(row, key=is_communication) if is_message] for row in schedule.actions
    ]
    rows = [list(row) for row in schedule.actions]
    posted, passed, progress = set(), set(), True
    while progress:
        progress = False
        for row in rows:
            while row and (row[0].is_communication or passed.issuperset(dataflow.receives(row[0]))):
                posted.add(row.pop(0))
                progress = True
        current = {message for queue in queues if queue for message in queue[0] if message in posted}
        meeting = {message for message in current if message.counterpart() in current and message not in passed}
        passed |= meeting
        for queue in queues:
            if queue and passed.issuperset(queue[0]):
                queue.pop(0)
                progress = True
        progress = progress or bool(meeting)
    return not any(rows) and not any(queues)


def is_communication(action):
    return action.is_communication


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_insert_communication_of_any_edges_can_be_played(draw_computation, data):
    computed = draw_computation(data)
    edges = draw_edges(data, computed.num_stages) if computed.num_stages > 1 else []

    # A chain that is cut somewhere leaves less to wait for.
    schedule = insert_communication(computed, edges)

    verify_schedule(schedule, edges)
    assert plays_in_batches(schedule, Dataflow(schedule, edges))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_insert_communication_leaves_the_order_of_computation_and_sends_at_once(draw_computation, data):
    computed = draw_computation(data)

    schedule = insert_communication(computed)

    dataflow = Dataflow(schedule)
    for row, original in zip(schedule.actions, computed.actions, strict=True):
        assert tuple(action for action in row if not action.is_communication) == original
        for position, action in enumerate(row):
            following = next((at for at in range(position + 1, len(row)) if not row[at].is_communication), len(row))
            assert set(dataflow.sends(action)) <= set(row[position:following])


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_insert_communication_costs_no_time_where_costs_are_as_expected(draw_computation, data):
    computed = draw_computation(data)
    costs = Costs(latency=2.0**-6)

    with_messages = simulate(insert_communication(computed), costs)

    assert with_messages.compute_spans == simulate(computed, costs).spans


def test_insert_communication_posts_receives_before_the_computation_in_which_messages_arrive():
    schedule = insert_communication(make_schedule("1f1b", 2, 3))

    assert format_schedule(schedule).splitlines() == [
        "0F0,0SA0>1,0F1,0SA1>1,0RG0<1,0B0,0RG1<1,0F2,0SA2>1,0B1,0RG2<1,0B2",
        "1RA0<0,1RA1<0,1F0,1B0,1SG0>0,1F1,1B1,1SG1>0,1RA2<0,1F2,1B2,1SG2>0",
    ]


def test_insert_communication_between_stages_of_one_rank_adds_nothing():
    alone = make_schedule("zb-v", 1, 3)
    turning = insert_communication(make_schedule("zb-v", 2, 1))

    assert insert_communication(alone) == alone
    assert format_schedule(turning).splitlines() == [
        "0F0,0SA0>1,3RA0<2,3F0,3I0,3SG0>2,3W0,0RG0<1,0I0,0W0",
        "1RA0<0,1F0,2F0,2SA0>3,2RG0<3,2I0,2W0,1I0,1SG0>0,1W0",
    ]


def test_insert_communication_of_a_skip_without_gradient_sends_it_forward_only():
    edges = [*chain(3), Edge(0, 2, needs_gradient=False)]

    schedule = insert_communication(make_schedule("1f1b", 3, 1), edges)

    sends = sorted(str(action) for row in schedule.actions for action in row if action.kind in SENDS)
    assert sends == ["0SA0>1", "0SA0>2", "1SA0>2", "1SG0>0", "2SG0>1"]


def test_insert_communication_puts_messages_of_one_time_to_one_rank_next_to_each_other():
    edges = [*chain(6), Edge(0, 2), Edge(0, 4)]

    schedule = insert_communication(make_schedule("interleaved", 3, 1), edges)

    assert list(map(str, schedule.actions[0][:4])) == ["0F0", "0SA0>1", "0SA0>4", "0SA0>2"]


def test_insert_communication_replaces_messages_that_are_there():
    once = insert_communication(make_schedule("zb-h1", 3, 4))

    assert insert_communication(once) == once


def test_insert_communication_of_an_order_that_waits_for_ever_raises():
    schedule = custom_schedule([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])

    with pytest.raises(
        ValueError, match=r"rank 0, position 1 \(0B0\) waits for 0RG0<1; .*rank 1, position 0 \(1F1\) wait"
    ):
        insert_communication(schedule)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([Edge(1, 0)], "stages 0 to 1, and a stage can only use values of earlier stages"),
        ([Edge(0, 0)], "stages 0 to 1, and"),
        ([Edge(0, 2)], "stages 0 to 1, and"),
        (
            [Edge(0, 1), Edge(0, 1, needs_gradient=False)],
            "pass one edge per pair of stages; it carries all their values",
        ),
    ],
)
def test_insert_communication_of_impossible_edges_raises(edges, message):
    with pytest.raises(ValueError, match=message):
        insert_communication(make_schedule("1f1b", 2, 1), edges)
