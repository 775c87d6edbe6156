"""Contents with images in rows: the forms that they are given in, and rows that are refused."""

import re

import pytest
from nxd_data import read_conversation
from nxd_data.content_parts import forms_of_contents, text_of, with_text

TEXT = {"type": "text", "text": "What is it?"}
BARE = {"type": "image"}


def _row(*parts, **columns):
    return {
        "messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "A cat"}],
        **columns,
    }


@pytest.mark.parametrize(
    ("part", "columns", "written", "content"),
    [
        ({"type": "image", "image": "a.png"}, {}, "a.png", None),
        ({"type": "image", "path": "a.png"}, {}, "a.png", None),
        ({"type": "image", "url": "data:image/png;base64,AAAA"}, {}, "data:image/png;base64,AAAA", None),
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, {}, "a.png", None),
        ({"type": "image_url", "image_url": "a.png"}, {}, "a.png", None),
        ({"type": "input_image", "image_url": "a.png"}, {}, "a.png", None),
        ({"type": "image", "base64": "AAAA"}, {}, "data:image/png;base64,AAAA", None),
        ({"type": "image", "image": {"bytes": b"x", "path": "a.png"}}, {}, None, b"x"),
        ({"type": "image", "image": {"bytes": None, "path": "a.png"}}, {}, "a.png", None),
        ({"type": "image", "image": None, "text": None}, {"images": ["a.png"]}, "a.png", None),
        (BARE, {"images": [{"bytes": b"x", "path": None}]}, None, b"x"),
        (BARE, {"image": {"bytes": b"x"}}, None, b"x"),
        (BARE, {"image": "a.png", "images": None}, "a.png", None),
    ],
)
def test_image_part_of_any_form_is_the_same_image(part, columns, written, content):
    conversation = read_conversation("here", _row(part, TEXT, **columns))

    assert conversation.messages[0]["content"] == [BARE, TEXT]
    [image] = conversation.images
    assert (image.written, image.content) == (written, content)
    assert image.place.startswith("here: ")


def test_images_of_a_column_take_the_bare_parts_in_order():
    row = _row(BARE, TEXT, {"type": "image", "path": "own.png"}, BARE, images=["first.png", "second.png"])

    conversation = read_conversation("here", row)

    assert [image.written for image in conversation.images] == ["first.png", "own.png", "second.png"]


def test_images_without_parts_take_the_places_that_texts_have_for_them():
    row = {
        "conversations": [
            {"from": "human", "value": "<image>\nIs it like <image>?"},
            {"from": "gpt", "value": "Yes"},
        ],
        "images": ["a.png", "b.png"],
    }

    messages = read_conversation("here", row).messages

    expected = [BARE, {"type": "text", "text": "\nIs it like "}, BARE, {"type": "text", "text": "?"}]
    assert messages[0]["content"] == expected
    assert messages[1]["content"] == "Yes"


def test_images_without_parts_come_before_the_first_text_of_the_user():
    row = {"prompt": "What is it?", "completion": "A cat", "images": ["a.png", "b.png"]}

    conversation = read_conversation("here", row)

    assert conversation.messages[0]["content"] == [BARE, BARE, TEXT]
    assert conversation.first_answer == 1
    assert len(conversation.images) == 2


def test_texts_without_images_stay_strings():
    conversation = read_conversation("here", _row(TEXT, TEXT, images=[]))

    assert conversation.messages[0]["content"] == "What is it?What is it?"
    assert conversation.images == ()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (_row({"type": "video", "video": "a.mp4"}), "content[0] has the type 'video'; only text and images"),
        (_row({"type": "input_audio", "input_audio": {}}), "content[0] has the type 'input_audio'; only text"),
        (_row({"type": "audio_url"}), "has the type 'audio_url'; only text"),
        (_row({"type": "thing"}), "has the type 'thing'; expected a part of the type text or image"),
        (_row(TEXT, 5), "content[1] is a int; expected an object with type"),
        (_row([BARE]), "content[0] is a list; expected an object with type"),
        (_row({"type": "text", "text": None}), "has the type 'text'; expected a part"),
        (_row({"type": "image", "image": 5.0}), "image is a float; expected a path"),
        (_row({"type": "image", "image": float("nan")}), "image is a float; expected a path"),
        (_row({"type": "image", "image": [["a.png"]]}), "image is a list; expected a path"),
        (_row({"type": "image", "image": {"bytes": None, "path": None}}), "image has neither bytes nor a path"),
        (_row({"type": "image", "image": {}}), "image has neither bytes nor a path"),
        (_row({"type": "image", "path": "a.png", "url": "b.png"}), "has path and url; give an image once"),
        (_row({"type": "image_url"}), "has the type image_url without image_url"),
        (_row(BARE), "has 1 image parts without an image, but no column images"),
        (_row(BARE, BARE, images=["a.png"]), "has 2 image parts without an image, but 1 in the column images"),
        (_row(BARE, images=["a.png", "b.png"]), "has 1 image parts without an image, but 2 in the column images"),
        (
            _row({"type": "text", "text": "<image>?"}, images=["a", "b"]),
            "has 1 times <image> in its texts, but 2 images",
        ),
        (_row({"type": "text", "text": "<image><image>"}, image="a"), "has 2 times <image> in its texts, but 1 images"),
        (_row({"type": "text", "text": "<image>"}, images=[]), "has 1 times <image> in its texts, but 0 images"),
        (_row(BARE, images=[None]), "images[0]: image is nothing; expected a path"),
        (_row(BARE, images=[["a.png"]]), "images[0]: image is a list; expected a path"),
        (_row(BARE, images={"bytes": None}), "images[0]: image has neither bytes nor a path"),
    ],
)
def test_row_with_another_form_of_image_is_one_line(row, reason):
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        read_conversation("chat.jsonl, line 3", row)

    assert str(caught.value).startswith("chat.jsonl, line 3")
    assert "\n" not in str(caught.value)


def test_forms_of_contents_with_images_are_parts_and_then_strings_where_they_can_be():
    messages = [{"role": "user", "content": [BARE, TEXT]}, {"role": "assistant", "content": "A cat"}]

    parts, mixed = forms_of_contents(messages)

    assert parts[1]["content"] == [{"type": "text", "text": "A cat"}]
    assert mixed == messages


def test_text_of_a_content_can_be_replaced_beside_its_images():
    message = {"role": "user", "content": [TEXT, BARE, TEXT]}

    changed = with_text(message, "else")

    assert changed["content"] == [{"type": "text", "text": "else"}, BARE]
    assert text_of(changed) == "else"
