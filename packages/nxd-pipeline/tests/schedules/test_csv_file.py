import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_pipeline.schedules import (
    format_schedule,
    insert_communication,
    make_schedule,
    parse_schedule,
    read_schedule,
    verify_schedule,
    write_schedule,
)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_parse_schedule_of_any_schedules_text_gives_the_schedule(draw_schedule, data):
    schedule = draw_schedule(data)

    assert parse_schedule(format_schedule(schedule), name=schedule.name) == schedule


def test_write_schedule_and_read_schedule_give_it_back_named_like_the_file(tmp_path):
    schedule = insert_communication(make_schedule("1f1b", 2, 2))

    write_schedule(schedule, tmp_path / "1f1b.csv")

    assert (tmp_path / "1f1b.csv").read_text() == (
        "0F0,0SA0>1,0F1,0SA1>1,0RG0<1,0B0,0RG1<1,0B1\n1RA0<0,1RA1<0,1F0,1B0,1SG0>0,1F1,1B1,1SG1>0\n"
    )
    assert read_schedule(tmp_path / "1f1b.csv") == schedule


def test_parse_schedule_with_idle_cells_can_be_completed_and_played():
    text = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1, ,1B1,\n"

    schedule = insert_communication(parse_schedule(text))

    assert verify_schedule(schedule) == (2, 1)


def test_parse_schedule_of_a_cell_that_is_no_action_raises():
    with pytest.raises(ValueError, match="rank 1: action '1FORWARD0' cannot be parsed"):
        parse_schedule("0F0,0B0\n1FORWARD0,1B0\n")


def test_read_schedule_of_a_spreadsheets_file_ignores_its_mark_and_blank_lines(tmp_path):
    (tmp_path / "table.csv").write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n\r\n1F0,1B0\r\n\r\n")

    assert read_schedule(tmp_path / "table.csv").actions == parse_schedule("0F0,0B0\n1F0,1B0\n").actions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"' + "x" * 200_000, "is not CSV: field larger than field limit"),
        ("0F0,0B0\n999999999999F0,1B0\n", "no rank has actions of stage 2"),
        ("", "no rank has actions of stage 0"),
    ],
)
def test_parse_schedule_of_text_that_is_none_raises_at_once(text, message):
    with pytest.raises(ValueError, match=message):
        parse_schedule(text)
