"""Conversations in every form, and which of their tokens the assistant says."""

import json

import pytest
from nxd_data import ChatTemplate, Conversation, load_tokenizer, read_conversation, rendering

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
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"city": {"type": "string"}}}}}


def called(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}


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
        ({"messages": json.dumps(TURNS), "tools": '[{"name": "look"}]'}, Conversation(TURNS, [{"name": "look"}])),
        (
            {"messages": [{**it, "content": [{"type": "text", "text": it["content"]}]} for it in TURNS]},
            Conversation(TURNS),
        ),
        ({"messages": [{**it, "tool_calls": [], "name": None} for it in TURNS]}, Conversation(TURNS)),
    ],
)
def test_row_of_any_form_is_the_same_conversation(row, expected):
    assert read_conversation("a.jsonl, line 1", row) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "id": 1}, r"is not a conversation; expected messages, .* it has text, id; .* set data\.column"),
        ({}, r"it has no columns"),
        ({"prompt": "a"}, r"is not a conversation"),
        ({"messages": "a"}, r"messages is a str; expected a list of messages"),
        ({"messages": []}, r"messages is empty; expected a list"),
        ({"messages": ["a"]}, r"messages\[0\] is a str; expected an object with role and content"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] has no role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has nothing as its content; expected text"),
        (
            {"messages": [{"role": "user", "content": "a\ud83d"}]},
            r"messages\[0\] has '\\ud83d' in its content, half",
        ),
        ({"messages": [{"role": "user", "content": [{}]}]}, r"content\[0\] has the type .None.; expected a part"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, r"is from 'narrator'; expected one of system, human"),
        ({"messages": TURNS, "tools": "look"}, r"tools is a str; expected a list of JSON schemas"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, r"has the role 'asistant'; did you mean 'assistant'"),
        ({"messages": [{**TURNS[2], "weight": 0.5}]}, r"has weight=0\.5; expected 1 or true, or 0 or false"),
        ({"messages": [{**TURNS[1], "train": True}]}, r"has train=True and the role 'user'; only the assistant's"),
        ({"messages": [called("[3]")]}, r"tool_calls\[0\] has '\[3\]' as its arguments; expected an object"),
        ({"messages": [called('{"city": ')]}, r"tool_calls\[0\]: arguments is not JSON"),
        ({"messages": [{"role": "assistant", "function_call": {}, "content": ""}]}, r"function_call, which tool_calls"),
    ],
)
def test_row_without_a_conversation_is_refused_with_its_place(row, message):
    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 7.*{message}"):
        read_conversation("a.jsonl, line 7", row)


def learned_text(folder, conversation):
    """What is learned, token by token, where several answers are separated by a bar."""
    tokens, learned, *_ = ChatTemplate(folder).encode("here", conversation)
    decode = load_tokenizer(folder).decode
    parts, previous = [], False
    for token, is_learned in zip(tokens.tolist(), learned.tolist(), strict=True):
        if is_learned:
            parts.append(("" if previous or not parts else "|") + decode([token], skip_special_tokens=False))
        previous = is_learned
    return "".join(parts)


@pytest.mark.sample(3)
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

    tokens, *_ = ChatTemplate(folder / "tokenizer.json").encode("here", Conversation(TURNS))

    own = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokens.tolist() == own.apply_chat_template(TURNS, return_dict=True)["input_ids"]
    assert own.decode(tokens).startswith("<|system|>be the cat<end><|user|>who sat?<end><|assistant|>the cat<end>")


def test_tools_are_told_by_the_template(make_chat_tokenizer):
    folder = make_chat_tokenizer("{% for t in tools or [] %}{{ t['name'] }}<end>{% endfor %}" + UNMARKED)

    tokens, *_ = ChatTemplate(folder).encode("here", Conversation(TURNS, [{"name": "look"}]))

    assert load_tokenizer(folder).decode(tokens.tolist()).startswith("look")


# What the templates of public models do, in few words.
CHATML = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{%- if call.function %}{%- set call = call.function %}{%- endif %}"
    "{{- '[' + call.name + ' ' }}{{- call.arguments | tojson }}{{- ']' }}{%- endfor %}{{- '<end>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
# Drops earlier thoughts, and has a thought in the last answer, as Qwen3.
FORGETS = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages[::-1] %}{%- if ns.last < 0 and m.role == 'user' %}"
    "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{- '<|' + m.role + '|>\n' }}{%- set content = m.content.split('</think>')[-1] %}"
    "{%- if loop.index0 > ns.last %}{{- '<think>' + (m.reasoning_content or '') + '</think>' }}{%- endif %}"
    "{{- content + '<end>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
ASKS_FOR_THOUGHTS = FORGETS[: -len("' }}{%- endif %}")] + "<think>' }}{%- endif %}"  # as Qwen3.6
TRIMS_AND_ENDS = (  # as Llama 3 and Gemma trim, and Phi-3 ends a conversation
    "{{ '<|system|>' + messages[0]['content'] }}{% for message in messages[1:] %}"
    "{% set content = '<|' + message['role'] + '|>' + message['content'] | trim + '<end>' %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
NEXT_ROLE_ENDS = (  # as GLM-4.5
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BY_INDEX = (
    "{% for i in range(messages|length) %}{{ '<|' + messages[i].role + '|>' + messages[i].content + '<end>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "the cat<end>\n|on the mat<end>\n"),
        (FORGETS, "the cat<end>\n|<think></think>on the mat<end>\n"),
        (ASKS_FOR_THOUGHTS, "the cat<end>\n|</think>on the mat<end>\n"),
        (TRIMS_AND_ENDS, "the cat<end>|on the mat<end><end>"),
        (NEXT_ROLE_ENDS, "the cat<|user|>|on the mat<|user|>"),
        (BY_INDEX, "the cat<end>|on the mat<end>"),
    ],
    ids=["ChatML", "drops thoughts", "asks for thoughts", "trims", "next role ends", "by index"],
)
def test_answers_are_found_in_what_any_template_renders(make_chat_tokenizer, template, expected):
    folder = make_chat_tokenizer(template)

    assert learned_text(folder, Conversation(TURNS)) == expected


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("template", "num_lost"), [(CHATML, 2), (FORGETS, 1)], ids=["knows no thoughts", "drops earlier ones"]
)
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning", None])
def test_thoughts_that_a_template_leaves_out_are_counted(make_chat_tokenizer, template, num_lost, key):
    thoughts = {2: "the", 4: "on"}  # which others say as well
    turns = [
        {**turn, key: thoughts[number]}
        if key and number in thoughts
        else {**turn, "content": f"<think>{thoughts[number]}</think>{turn['content']}"}
        if number in thoughts
        else turn
        for number, turn in enumerate(TURNS)
    ]
    if key is None:  # ChatML writes all of a content, and this one no thought from there
        num_lost = 0 if template == CHATML else 2

    encoded = ChatTemplate(make_chat_tokenizer(template)).encode("here", Conversation(turns))
    last_alone = ChatTemplate(make_chat_tokenizer(template)).encode("here", Conversation(turns, first_answer=4))

    assert encoded.num_lost_thoughts == num_lost
    assert last_alone.num_lost_thoughts == max(0, num_lost - 1)


@pytest.mark.parametrize("template", [CHATML, FORGETS, TRIMS_AND_ENDS], ids=["ChatML", "drops thoughts", "trims"])
def test_answer_that_begins_with_a_line_break_is_learned_whole(make_chat_tokenizer, template):
    turns = [*TURNS[:2], {"role": "assistant", "content": "\nthe cat"}, *TURNS[3:]]

    learned = learned_text(make_chat_tokenizer(template), Conversation(turns))

    assert learned.strip().startswith("the cat<end>")
    assert "on the mat<end>" in learned


@pytest.mark.sample(2)
@pytest.mark.parametrize("template", [MARKED, FORGETS, BY_INDEX], ids=["marked", "unmarked", "by index"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False}, {"weight": 0.0, "train": True}])
def test_turn_that_is_switched_off_is_not_learned(make_chat_tokenizer, template, mark):
    turns = [*TURNS[:2], {**TURNS[2], **mark}, TURNS[3], {**TURNS[4], "weight": 1}]
    folder = make_chat_tokenizer(template)

    tokens, *_ = ChatTemplate(folder).encode("here", Conversation(turns))

    assert learned_text(folder, Conversation(turns)).removeprefix("<think></think>").strip() == "on the mat<end>"
    assert tokens.tolist() == ChatTemplate(folder).encode("here", Conversation(TURNS))[0].tolist()


TAKES_TEXT = CHATML.replace("call.arguments | tojson", "call.arguments")  # DeepSeek's: written as Python writes objects
ADDS_TEXT = CHATML.replace("{{- call.arguments | tojson }}{{- ']' }}", "{{- call.arguments + ']' }}")
WALKS = CHATML.replace(
    "{{- call.arguments | tojson }}", "{%- for k, v in call.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}, {"city": "Paris", "zip": None}])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, '[look {"city": "Paris"}]'),
        (TAKES_TEXT, '[look {"city": "Paris"}]'),
        (ADDS_TEXT, '[look {"city": "Paris"}]'),
        (WALKS, "[look city=Paris]"),
    ],
    ids=["tojson", "as it is", "joined", "items"],
)
def test_calls_of_tools_are_rendered_as_the_template_expects(make_chat_tokenizer, template, expected, arguments):
    folder = make_chat_tokenizer(template)
    row = {"messages": [TURNS[1], called(arguments), {"role": "tool", "content": "a cat"}]}

    assert learned_text(folder, read_conversation("here", row)) == f"{expected}<end>\n"
    if arguments != {"city": "Paris", "zip": None}:  # a client's is no column that other rows have filled
        prompt = ChatTemplate(folder).encode_prompt(
            [{**it, "tool_calls": it.get("tool_calls", [])} for it in row["messages"]]
        )
        assert expected in load_tokenizer(folder).decode(prompt)


# May not think, and how hard to think, as Qwen3 and gpt-oss have it.
THINKS_IF_ASKED = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<end>' }}{%- endfor %}"
    "{%- if reasoning_effort is defined %}{{- 'effort ' + reasoning_effort }}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- 'no thoughts' }}{%- endif %}{%- endif %}"
)


@pytest.mark.parametrize(
    ("variables", "end"),
    [
        ({}, "<|assistant|>"),
        ({"enable_thinking": True}, "<|assistant|>"),
        ({"enable_thinking": False, "reasoning_effort": "low"}, "effort low<|assistant|>no thoughts"),
    ],
)
def test_template_is_told_the_variables_of_a_prompt(make_chat_tokenizer, variables, end):
    folder = make_chat_tokenizer(THINKS_IF_ASKED)

    prompt = ChatTemplate(folder).encode_prompt(TURNS[:2], None, variables)

    written = load_tokenizer(folder).decode(prompt, skip_special_tokens=False)
    assert written == f"<|system|>be the cat<end><|user|>who sat?<end>{end}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("enable_thinkin", r"does not read 'enable_thinkin'; did you mean 'enable_thinking'\?"),
        ("documents", r"'documents' is already set for the chat template; leave it out"),
        ("messages", r"'messages' is already set"),
        ("tools", r"'tools' is already set"),
        ("add_generation_prompt", r"'add_generation_prompt' is already set"),
        ("eos_token", r"'eos_token' is already set"),
        ("_nxd_start", r"does not read '_nxd_start'; leave it out"),
    ],
)
def test_variable_that_a_template_does_not_read_or_a_prompt_may_not_set_is_refused(make_chat_tokenizer, name, message):
    chat = ChatTemplate(make_chat_tokenizer(THINKS_IF_ASKED))

    with pytest.raises(LookupError, match=message):
        chat.encode_prompt(TURNS[:2], None, {name: "x"})


@pytest.mark.parametrize("role", ["developer", "system"])
@pytest.mark.parametrize("template", [CHATML, TRIMS_AND_ENDS])
def test_developer_is_the_system_where_a_template_has_none(make_chat_tokenizer, template, role):
    chat = ChatTemplate(make_chat_tokenizer(template))

    assert chat.encode_prompt([{**TURNS[0], "role": role}, TURNS[1]]) == chat.encode_prompt(TURNS[:2])


KNOWN_ROLES = CHATML.replace("{{- '<|'", "{%- if message.role in ['user', 'assistant'] %}{{- '<|'").replace(
    "{{- '<end>\n' }}", "{{- '<end>\n' }}{%- endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "message"),
    [
        (KNOWN_ROLES, TURNS, None, r"message 0, of the role 'system'; use a role that it renders"),
        (KNOWN_ROLES, [*TURNS[1:3], {"role": "critic", "content": "the cat"}, *TURNS[3:]], None, r"message 2"),
        (UNMARKED, [TURNS[1], {**called({}), "content": "a"}], None, r"the tool_calls of message 1"),
        (CHATML, TURNS, [LOOK], r"tools, such as 'look'; leave tools out"),
    ],
    ids=["system", "critic", "calls", "tools"],
)
def test_what_a_template_leaves_out_is_refused(make_chat_tokenizer, template, messages, tools, message):
    chat = ChatTemplate(make_chat_tokenizer(template))

    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 7: the chat template of .* leaves out {message}"):
        chat.encode("a.jsonl, line 7", Conversation(messages, tools))
    with pytest.raises(ValueError, match=f"leaves out {message}"):
        chat.encode_prompt(messages, tools)


PROMPT_DIFFERS = BY_INDEX.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}<|tool|>")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (PROMPT_DIFFERS, r"the text before message 2 differently than in the whole .* \{% generation %\}"),
        ("{{ raise_exception('turns must alternate') }}", r"the chat template of .* refuses it: turns must alternate"),
        ("{{ 1 / 0 }}", r"the chat template of .* refuses it: division by zero"),
        ("{{ messages.append(1) }}", r"refuses it: .* is not safely callable|refuses it: access to attribute"),
        ("{{ ''.__class__.__mro__ }}", r"refuses it: access to attribute '__class__'"),
        ("{{ 'a'.center(9 ** 9 * 9) }}", r"refuses it: it takes more than 512 MiB of memory"),
        ("{% for a in range(99999) %}{{ 'a' * 999 }}{% endfor %}", r"refuses it: it renders more than \d+ characters"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", r"takes more than .* time"),
        ("{{ 9 ** (9 ** 9) }}", r"takes more than .* s of processor time"),
    ],
)
def test_template_that_is_no_use_is_refused_in_one_line(make_chat_tokenizer, monkeypatch, template, message):
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.2)
    template = ChatTemplate(make_chat_tokenizer(template))

    for _ in range(2):  # the second time in another process, where the first one has died
        with pytest.raises(ValueError, match=rf"^a\.jsonl, line 7: .*({message})") as raised:
            template.encode("a.jsonl, line 7", Conversation(TURNS))

    assert "\n" not in str(raised.value)


def test_conversation_may_begin_with_the_assistant(make_chat_tokenizer):
    assert learned_text(make_chat_tokenizer(UNMARKED), Conversation(TURNS[2:])) == "the cat<end>|on the mat<end>"


def test_tokenizer_without_a_chat_template_is_refused(make_chat_tokenizer):
    folder = make_chat_tokenizer(None)

    with pytest.raises(
        ValueError, match=r"data\.chat=true needs a chat template, but .* has none; set data\.tokenizer"
    ):
        ChatTemplate(folder)
