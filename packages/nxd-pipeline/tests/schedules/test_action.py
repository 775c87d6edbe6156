import pytest
from hypothesis import given
from hypothesis import strategies as st
from nxd_pipeline.schedules import COMMUNICATION, Action, ActionKind, parse_action

NUMBERS = st.integers(0, 200)


@st.composite
def actions(draw):
    kind = draw(st.sampled_from(ActionKind))
    return Action(kind, draw(NUMBERS), draw(NUMBERS), draw(NUMBERS) if kind in COMMUNICATION else None)


@given(actions())
def test_parse_action_of_any_actions_text_gives_the_action(action):
    assert parse_action(str(action)) == action


def test_action_is_written_as_documented():
    written = [
        str(Action(ActionKind.FORWARD, 0, 3)),
        str(Action(ActionKind.BACKWARD, 1, 0)),
        str(Action(ActionKind.BACKWARD_INPUT, 1, 0)),
        str(Action(ActionKind.BACKWARD_WEIGHT, 1, 0)),
        str(Action(ActionKind.SEND_ACTIVATION, 0, 3, peer=1)),
        str(Action(ActionKind.RECV_ACTIVATION, 1, 3, peer=0)),
        str(Action(ActionKind.SEND_GRADIENT, 1, 3, peer=0)),
        str(Action(ActionKind.RECV_GRADIENT, 0, 3, peer=1)),
    ]

    assert written == ["0F3", "1B0", "1I0", "1W0", "0SA3>1", "1RA3<0", "1SG3>0", "0RG3<1"]


@pytest.mark.parametrize(
    ("text", "counterpart"), [("0SA3>1", "1RA3<0"), ("1RA3<0", "0SA3>1"), ("1SG3>0", "0RG3<1"), ("0RG3<1", "1SG3>0")]
)
def test_counterpart_of_a_message_is_its_other_end(text, counterpart):
    assert str(parse_action(text).counterpart()) == counterpart


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0f1", "-1F0", "0F1>2", "0SA1", "0SA1<2", "1RA1>0", "0F1 0B1"])
def test_parse_action_of_other_text_raises(text):
    with pytest.raises(ValueError, match=f"action '{text}' cannot be parsed; expected stage, kind and microbatch"):
        parse_action(text)


def test_action_with_a_peer_too_many_or_too_few_raises():
    with pytest.raises(ValueError, match="0SA1 needs the stage at the other end"):
        Action(ActionKind.SEND_ACTIVATION, 0, 1)
    with pytest.raises(ValueError, match="0F1 computes and takes no peer"):
        Action(ActionKind.FORWARD, 0, 1, peer=1)
    with pytest.raises(ValueError, match="0F1 computes; only"):
        Action(ActionKind.FORWARD, 0, 1).counterpart()
