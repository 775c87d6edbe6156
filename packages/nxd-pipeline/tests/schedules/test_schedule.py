import pytest
from nxd_pipeline.schedules import Schedule, custom_schedule, parse_action


def test_custom_schedule_from_text_and_actions_places_stages_where_they_compute():
    schedule = custom_schedule([["0F0", parse_action("3F0")], ["1F0", "2F0"]], name="mine")

    assert schedule.rank_of_stage == (0, 1, 1, 0)
    assert (schedule.name, schedule.num_microbatches, schedule.num_stages, schedule.num_ranks) == ("mine", 1, 4, 2)
    assert schedule.stages_of(0) == (0, 3)
    assert schedule.is_forward_only
    assert not schedule.has_communication


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["0F0"], ["0B0"]], r"rank 1, position 0 \(0B0\): stage 0 is on rank 0 already; a stage belongs to one rank"),
        ([["0F0"], ["2F0"]], "schedule 'custom': no rank has actions of stage 1"),
        ([[], []], "schedule 'custom': no rank has actions of stage 0"),
        ([["0F0"], []], r"actions for 2 ranks but stages on ranks \(0,\); assign every rank a stage"),
        ([["0F0", "0Q0"]], "rank 0: action '0Q0' cannot be parsed"),
        ([["0F0", "0SA0>1"]], r"rank 0, position 1 \(0SA0>1\): stages are 0 to 0"),
    ],
)
def test_custom_schedule_of_lists_that_make_none_raises(rows, message):
    with pytest.raises(ValueError, match=message):
        custom_schedule(rows)


@pytest.mark.parametrize(
    ("num_microbatches", "rank_of_stage", "rows", "message"),
    [
        (0, (0,), [["0F0"]], "num_microbatches=0; use 1 or more"),
        (1, (1, 0), [["0F0"], ["1F0"]], r"rank 0, position 0 \(0F0\): the stages of this rank are \[1\]"),
        (1, (0,), [["0F1"]], r"rank 0, position 0 \(0F1\): num_microbatches=1"),
        (1, (0, 2), [["0F0"], ["1F0"]], "assign every rank a stage, and every stage one of these ranks"),
    ],
)
def test_schedule_with_actions_in_wrong_places_raises(num_microbatches, rank_of_stage, rows, message):
    actions = tuple(tuple(map(parse_action, row)) for row in rows)

    with pytest.raises(ValueError, match=message):
        Schedule("mine", num_microbatches, rank_of_stage, actions)
