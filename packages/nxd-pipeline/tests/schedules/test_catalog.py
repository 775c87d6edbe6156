"""Every method, for any sizes, gives a schedule that can be played, in its order and within its memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_pipeline.schedules import (
    SCHEDULE_NAMES,
    TRAINING_SCHEDULES,
    format_schedule,
    forward_only,
    insert_communication,
    make_schedule,
    peak_in_flight,
    verify_schedule,
)

V_SHAPED = ("zb-v", "dualpipe-v")


def activations_at_most(schedule):
    """What the paper of each method promises, per rank, in activations of a stage."""
    size, number = schedule.num_ranks, schedule.num_microbatches
    stages_per_rank = schedule.num_stages // size
    group = number if number < size else -(-number // (number // size))
    every = {
        "inference": 0,
        "gpipe": number * stages_per_rank,
        "zb-h1": min(size, number),
        "zb-v": 2 * min(size, number),
        "dualpipe-v": min(2 * size + 1, 2 * number),
    }
    if schedule.name in every:
        return [every[schedule.name]] * size
    if schedule.name == "1f1b":
        return [min(size - rank, number) for rank in range(size)]
    warm_up = [2 * (size - 1 - rank) + (stages_per_rank - 1) * group for rank in range(size)]
    return [min(forwards + 1, number * stages_per_rank) for forwards in warm_up]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_make_schedule_of_any_sizes_can_be_played_within_its_memory(draw_computation, data):
    schedule = draw_computation(data)

    verify_schedule(insert_communication(schedule), max_in_flight=activations_at_most(schedule))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_forward_only_of_any_schedule_can_be_played_on_the_same_ranks(draw_schedule, data):
    training = draw_schedule(data)

    evaluation = forward_only(training)

    assert evaluation.rank_of_stage == training.rank_of_stage
    assert not evaluation.has_communication
    assert verify_schedule(insert_communication(evaluation)) == (0,) * training.num_ranks


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_make_schedule_places_stages_as_documented(name):
    schedule = make_schedule(name, 3, 4)

    by_stages_per_rank = {3: (0, 1, 2), 6: (0, 1, 2, 2, 1, 0) if name in V_SHAPED else (0, 1, 2, 0, 1, 2)}
    assert schedule.name == name
    assert schedule.rank_of_stage == by_stages_per_rank[schedule.num_stages]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 8])
def test_1f1b_warms_up_with_as_many_forwards_as_documented(num_microbatches):
    schedule = make_schedule("1f1b", 4, num_microbatches)

    for rank, actions in enumerate(schedule.actions):
        kinds = [action.kind for action in actions]
        warm_up = min(4 - 1 - rank, num_microbatches)
        assert kinds == ["F"] * warm_up + ["F", "B"] * (num_microbatches - warm_up) + ["B"] * warm_up


@pytest.mark.parametrize(
    ("name", "size", "number", "lines"),
    [
        ("gpipe", 2, 2, ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"]),
        ("zb-h1", 2, 3, ["0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2", "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2"]),
        (
            "interleaved",
            2,
            2,
            ["0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1", "1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1"],
        ),
        (
            "zb-v",
            2,
            3,
            [
                "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2",
                "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2",
            ],
        ),
        ("inference", 2, 2, ["0F0,0F1", "1F0,1F1"]),
    ],
)
def test_make_schedule_gives_the_published_order(name, size, number, lines):
    assert format_schedule(make_schedule(name, size, number)).splitlines() == lines


@pytest.mark.parametrize(("number", "group"), [(4, 4), (8, 4), (12, 4), (3, 3), (6, 6), (9, 5)])
def test_interleaved_warms_up_with_as_many_forwards_as_published(number, group):
    schedule = make_schedule("interleaved", 4, number, virtual_pipeline_size=3)

    for rank, actions in enumerate(schedule.actions):
        before_first_backward = [action.kind for action in actions].index("B")
        warm_up = min(2 * (4 - 1 - rank) + 2 * group, 3 * number)
        assert before_first_backward == min(warm_up + 1, 3 * number)
        assert [action.stage // 4 for action in actions[: 3 * group] if action.kind == "F"][:group] == [0] * group


def test_interleaved_with_a_stage_per_rank_is_1f1b():
    assert make_schedule("interleaved", 4, 6, virtual_pipeline_size=1) == make_schedule("1f1b", 4, 6)


def test_peak_in_flight_of_1f1b_is_a_fraction_of_gpipes():
    gpipe, one_forward_one_backward = (peak_in_flight(make_schedule(name, 4, 16)) for name in ("gpipe", "1f1b"))

    assert gpipe == (16, 16, 16, 16)
    assert one_forward_one_backward == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("2f2b", (2, 2, None), "unknown schedule '2f2b'; use one of gpipe, 1f1b, interleaved, zb-h1"),
        ("1f1b", (0, 2, None), "pipeline_size=0 is not a positive number; use 1 or more"),
        ("zb-v", (2, 0, None), "num_microbatches=0 is not a positive number"),
        ("1f1b", (2, "4", None), "num_microbatches='4' is not a positive number"),
        ("interleaved", (2, 2, -1), "virtual_pipeline_size=-1 is not a positive number"),
        ("1f1b", (2, 2, 2), "'1f1b' has virtual_pipeline_size=1, not 2; .* gpipe, interleaved, zb-v, dualpipe-v, inf"),
        ("zb-v", (2, 2, 3), "'zb-v' has virtual_pipeline_size=2, not 3; .* gpipe, interleaved, inference"),
    ],
)
def test_make_schedule_of_what_cannot_be_raises(name, sizes, message):
    pipeline_size, num_microbatches, virtual_pipeline_size = sizes

    with pytest.raises(ValueError, match=message):
        make_schedule(name, pipeline_size, num_microbatches, virtual_pipeline_size=virtual_pipeline_size)


def test_all_schedules_but_inference_train():
    assert sorted(SCHEDULE_NAMES) == sorted([*TRAINING_SCHEDULES, "inference"])
