"""Conversations in every form, and which of their tokens the assistant says."""

import pytest
from nxd_trainer.data import ChatTemplate, Conversation, load_tokenizer, read_conversation

from .conftest import MARKED, UNMARKED

TURNS = [
    {"role": "system", "content": "be the cat"},
    {"role": "user", "content": "who sat?"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "where?"},
    {"role": "assistant", "content": "on the mat"},
]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}.get(turn["role"], turn["role"]), "value": turn["content"]}
    for turn in TURNS
]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": TURNS, "source": "x"}, Conversation(TURNS)),
        ({"conversations": SHAREGPT}, Conversation(TURNS)),
        ({"conversations": TURNS}, Conversation(TURNS)),
        ({"prompt": "who sat?", "completion": "the cat"}, Conversation(TURNS[1:3], first_answer=1)),
        ({"prompt": TURNS[:4], "completion": TURNS[4:]}, Conversation(TURNS, first_answer=4)),
        ({"messages": TURNS, "tools": [{"name": "look"}]}, Conversation(TURNS, [{"name": "look"}])),
        ({"messages": TURNS, "prompt": None, "tools": []}, Conversation(TURNS)),  # as columns of parquet are unset
    ],
)
def test_row_of_any_form_is_the_same_conversation(row, expected):
    assert read_conversation("a.jsonl, line 1", row) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "id": 1}, r"is no conversation; expected messages, .* it has text, id; .* set data\.column"),
        ({}, r"it has no column"),
        ({"prompt": "a"}, r"is no conversation"),
        ({"messages": "a"}, r"messages is a str; expected a list of messages"),
        ({"messages": []}, r"messages is empty; expected a list"),
        ({"messages": ["a"]}, r"messages\[0\] is a str; expected an object with role and content"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] has no role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has nothing as its content; expected text"),
        ({"messages": [{"role": "user", "content": [{}]}]}, r"has a list as its content; expected text"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, r"is from 'narrator'; expected one of system, human"),
        ({"messages": TURNS, "tools": "look"}, r"tools is a str; expected a list of JSON schemas"),
    ],
)
def test_row_without_a_conversation_is_refused_with_its_place(row, message):
    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 7.*{message}"):
        read_conversation("a.jsonl, line 7", row)


def learned_text(folder, conversation):
    """What is learned, token by token, where several answers are separated by a bar."""
    tokens, learned = ChatTemplate(folder).encode("here", conversation)
    decode = load_tokenizer(folder).decode
    parts, previous = [], False
    for token, is_learned in zip(tokens.tolist(), learned.tolist(), strict=True):
        if is_learned:
            parts.append(("" if previous or not parts else "|") + (decode([token]) or "<end>"))
        previous = is_learned
    return "".join(parts)


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        (Conversation(TURNS), "the cat<end>|on the mat<end>"),
        (Conversation(TURNS, first_answer=4), "on the mat<end>"),
        (Conversation(TURNS[:2]), ""),
    ],
    ids=["both turns", "completion", "no answer"],
)
def test_only_what_the_assistant_says_is_learned(make_chat_tokenizer, template, conversation, expected):
    assert learned_text(make_chat_tokenizer(template), conversation) == expected


def test_tokens_are_those_of_the_chat_template(make_chat_tokenizer):
    folder = make_chat_tokenizer(UNMARKED)
    transformers = pytest.importorskip("transformers")

    tokens, _ = ChatTemplate(folder / "tokenizer.json").encode("here", Conversation(TURNS))

    own = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokens.tolist() == own.apply_chat_template(TURNS, return_dict=True)["input_ids"]
    assert own.decode(tokens).startswith("<|system|>be the cat<end><|user|>who sat?<end><|assistant|>the cat<end>")


def test_tools_are_told_by_the_template(make_chat_tokenizer):
    folder = make_chat_tokenizer("{% for t in tools or [] %}{{ t['name'] }}<end>{% endfor %}" + UNMARKED)

    tokens, _ = ChatTemplate(folder).encode("here", Conversation(TURNS, [{"name": "look"}]))

    assert load_tokenizer(folder).decode(tokens.tolist()).startswith("look")


LAST_TURN_DIFFERS = UNMARKED.replace("m['content'] + '<end>'", "('' if loop.last else '!') + m['content'] + '<end>'")
PROMPT_DIFFERS = UNMARKED.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}<|tool|>")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LAST_TURN_DIFFERS, r"what comes before message 2 in another way .* mark answers by \{% generation %\}"),
        (PROMPT_DIFFERS, r"what comes before message 2 in another way than in the whole conversation"),
        ("{{ raise_exception('turns must alternate') }}", r"the chat template of .* refuses it: turns must alternate"),
        ("{{ 1 / 0 }}", r"the chat template of .* refuses it: division by zero"),
    ],
)
def test_template_that_hides_the_answer_is_refused_in_one_line(make_chat_tokenizer, template, message):
    template = ChatTemplate(make_chat_tokenizer(template))

    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 7: .*{message}") as raised:
        template.encode("a.jsonl, line 7", Conversation(TURNS))

    assert "\n" not in str(raised.value)


def test_conversation_that_begins_with_the_assistant_needs_a_marked_template(make_chat_tokenizer):
    template = ChatTemplate(make_chat_tokenizer(UNMARKED))

    with pytest.raises(ValueError, match=r"what comes before message 0 in another way"):
        template.encode("here", Conversation(TURNS[2:]))


def test_tokenizer_without_a_chat_template_is_refused(make_chat_tokenizer):
    folder = make_chat_tokenizer(None)

    with pytest.raises(
        ValueError, match=r"data\.chat=true needs a chat template, and .* has none; set data\.tokenizer"
    ):
        ChatTemplate(folder)
