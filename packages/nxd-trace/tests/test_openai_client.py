"""The official OpenAI client gets what it asks for, field by field."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import serve_tiny
import tiny_decoder
import torch
from nxd_trace.generation import compile_generator
from nxd_trace.serving import CompletionService, ServerLimits, make_app
from starlette.testclient import TestClient

LETTERS = serve_tiny.Letters()
PROMPT = "once upon"
GREEDY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
USER = {"role": "user", "content": "once upon"}
CHAT = {"model": "tiny", "messages": [USER], "max_tokens": 8, "temperature": 0}


class LettersTemplate:
    """A chat template with one letter per role, and tools first."""

    def encode_prompt(self, messages, tools=None, variables=None):
        if messages[0]["role"] == "nobody":
            raise ValueError("the chat template refuses the messages: who is nobody?")
        if "tools" in (variables or {}):
            raise LookupError("'tools' is given to the template otherwise")
        told = "".join(tool["function"]["name"] for tool in tools or [])
        said = "".join(message["role"][0] + message["content"] + "." for message in messages)
        return LETTERS.encode(told + said + "".join((variables or {}).values()) + "a")


@pytest.fixture(scope="module")
def engine():
    sizes = {"batch_size": 4, "max_length": 48, "prefill_lengths": (16,), "compiler": "export", "progress": False}
    with compile_generator(tiny_decoder.TinyDecoder, **sizes) as generator:
        yield generator.engine


@pytest.fixture
def http(engine):
    service = CompletionService(
        engine, LETTERS, model="tiny", chat=LettersTemplate(), limits=ServerLimits(max_waiting=200)
    )
    with TestClient(make_app(service), base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client
    assert engine.is_idle


@pytest.fixture
def client(http):
    return openai.OpenAI(base_url="http://localhost/v1", api_key="-", http_client=http, max_retries=0)


def greedy_text(prompt, number):
    tokens = tiny_decoder.plain_greedy(LETTERS.encode(prompt), number)
    return LETTERS.decode(tokens[: tokens.index(31)] if 31 in tokens else tokens)


def logprobs_after(text):
    return tiny_decoder.plain_logits(LETTERS.encode(text)).log_softmax(0)


def test_chat_is_answered_through_the_template(client):
    found = client.chat.completions.create(**CHAT)

    message = found.choices[0].message
    assert (found.object, message.role) == ("chat.completion", "assistant")
    assert message.content == greedy_text("uonce upon.a", 8)
    assert found.usage.prompt_tokens == len("uonce upon.a")
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


@pytest.mark.slow
def test_template_gets_tools_unless_tool_choice_is_none(client):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    with_tools = client.chat.completions.create(**CHAT, tools=tools).choices[0].message.content
    without = client.chat.completions.create(**CHAT, tools=tools, tool_choice="none").choices[0].message.content

    assert with_tools == greedy_text("lookuonce upon.a", 8)
    assert without == greedy_text("uonce upon.a", 8) != with_tools


@pytest.mark.parametrize(
    "variables",
    [{"chat_template_kwargs": {"x": "low"}}, {"reasoning_effort": "low"}, {"chat_template_kwargs": {}}],
    ids=["chat_template_kwargs", "reasoning_effort", "none"],
)
def test_variables_of_a_request_reach_the_template(client, variables):
    said = client.chat.completions.create(**CHAT, extra_body=variables).choices[0].message.content

    assert said == greedy_text("uonce upon.lowa" if any(variables.values()) else "uonce upon.a", 8)


@pytest.mark.slow
def test_content_in_parts_is_read_as_one_text(client):
    parts = [{"type": "text", "text": "once"}, {"type": "text", "text": " upon"}]

    found = client.chat.completions.create(**CHAT | {"messages": [{"role": "user", "content": parts}]})

    assert found.choices[0].message.content == greedy_text("uonce upon.a", 8)


@pytest.mark.slow
def test_chat_without_a_limit_writes_until_the_length_of_the_model(client):
    found = client.chat.completions.create(model="tiny", messages=[USER], temperature=0, logit_bias={"31": -100})

    assert found.usage.total_tokens == 48
    assert found.choices[0].finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_either_limit_of_a_chat_is_obeyed_and_named(client, name):
    asked = {"model": "tiny", "messages": [USER], "temperature": 0, "logit_bias": {"31": -100}}

    assert client.chat.completions.create(**asked, **{name: 3}).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**asked, **{name: 40})
    assert (raised.value.param, raised.value.code) == (name, "context_length_exceeded")
    assert f"12 prompt tokens and {name}=40 are more than the max_length=48" in raised.value.message


def streamed(events, has_usage):
    """Collect each text, finish reason and log-probabilities from a stream."""
    texts, reasons, scores = {}, {}, {}
    for event in events:
        if has_usage and not event.choices:
            assert event.usage.total_tokens > 0
            continue
        assert getattr(event, "usage", None) is None
        for choice in event.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            texts[choice.index] = texts.get(choice.index, "") + text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                dumped = choice.logprobs.model_dump()
                kept = scores.setdefault(choice.index, {})
                for name, values in dumped.items():
                    kept[name] = kept.get(name, []) + values if isinstance(values, list) else values
    return [(texts[index], reasons[index], scores.get(index)) for index in sorted(texts)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["completions", "chat"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"n": 2, "temperature": 1.5, "seed": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["e"]},
        {"echo": True, "logprobs": True},
        {"stream_options": {"include_usage": True}},
    ],
    ids=lambda change: "-".join(change) or "plain",
)
def test_stream_has_what_the_whole_answer_has(client, kind, change):
    create = client.chat.completions.create if kind == "chat" else client.completions.create
    asked = dict(CHAT if kind == "chat" else GREEDY) | change
    if kind == "chat":
        asked.pop("echo", None)
    elif "logprobs" in asked:
        asked["logprobs"] = asked.pop("top_logprobs", 1)
    options = asked.pop("stream_options", None)

    whole = create(**asked)
    pieces = list(create(**asked, stream=True, **({"stream_options": options} if options else {})))

    expected = [
        (
            it.text if kind == "completions" else it.message.content,
            it.finish_reason,
            None if it.logprobs is None else it.logprobs.model_dump(),
        )
        for it in whole.choices
    ]
    assert streamed(pieces, bool(options)) == expected
    if options:
        assert pieces[-1].usage == whole.usage.model_copy(
            update={"prompt_tokens_details": pieces[-1].usage.prompt_tokens_details}
        )


@pytest.mark.slow
def test_n_texts_have_seeds_of_their_own(client):
    asked = GREEDY | {"temperature": 5.0}
    alone = [client.completions.create(**asked, seed=seed).choices[0].text for seed in (7, 8, 9)]

    together = client.completions.create(**asked, seed=7, n=3)

    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert len(set(alone)) == 3
    assert together.usage.prompt_tokens == 9


@pytest.mark.slow
def test_best_of_returns_the_most_likely_texts(client):
    asked = GREEDY | {"temperature": 5.0, "seed": 7}
    tried = client.completions.create(**asked, n=5, logprobs=0).choices
    means = {choice.text: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs) for choice in tried}

    best = client.completions.create(**asked, n=2, best_of=5)

    assert [choice.text for choice in best.choices] == sorted(means, key=means.get, reverse=True)[:2]
    assert best.choices[0].logprobs is None


@pytest.mark.slow
def test_logprobs_0_returns_only_those_of_the_sampled_tokens(client):
    found = client.completions.create(**GREEDY | {"temperature": 5.0, "seed": 1}, logprobs=0).choices[0]

    text, scores = PROMPT, []
    for letter in found.text:
        scores.append(float(logprobs_after(text)[LETTERS.encode(letter)[0]]))
        text += letter
    assert found.logprobs.tokens == list(found.text)
    assert found.logprobs.text_offset == list(range(len(found.text)))
    assert found.logprobs.token_logprobs == pytest.approx(scores, rel=1e-9)
    assert [list(top) for top in found.logprobs.top_logprobs] == [[letter] for letter in found.text]


def test_top_logprobs_of_a_chat_are_the_likeliest_tokens(client):
    scored = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices[0].logprobs.content

    values, tokens = logprobs_after("uonce upon.a").topk(3)
    assert [top.token for top in scored[0].top_logprobs] == [LETTERS.decode([token]) for token in tokens.tolist()]
    assert [top.logprob for top in scored[0].top_logprobs] == pytest.approx(values.tolist(), rel=1e-9)
    assert scored[0].bytes == list(scored[0].token.encode())


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_with_logprobs_scores_the_prompt_as_well(client, max_tokens):
    found = client.completions.create(**GREEDY | {"max_tokens": max_tokens}, echo=True, logprobs=1).choices[0]

    assert found.text == PROMPT + greedy_text(PROMPT, max_tokens)
    scores = found.logprobs.token_logprobs
    expected = [float(logprobs_after(PROMPT[:end])[LETTERS.encode(PROMPT[end])[0]]) for end in range(1, len(PROMPT))]
    assert scores[0] is None
    assert scores[1 : len(PROMPT)] == pytest.approx(expected, rel=1e-9)
    assert len(scores) == len(found.text)


def penalized(prompt, number, change):
    """Return greedy tokens, with penalties computed directly."""
    tokens = LETTERS.encode(prompt)
    for _ in range(number):
        logits, written = tiny_decoder.plain_logits(tokens), tokens[len(prompt) :]
        factor = change.get("repetition_penalty", 1)
        for token in set(tokens):
            logits[token] *= 1 / factor if logits[token] > 0 else factor
        for token in set(written):
            logits[token] -= change.get("presence_penalty", 0) + change.get("frequency_penalty", 0) * written.count(
                token
            )
        for token, bias in change.get("logit_bias", {}).items():
            logits[int(token)] += bias
        tokens.append(int(logits.argmax()))
    return LETTERS.decode(tokens[len(prompt) :])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"logit_bias": {"4": 100, "31": -100}}],
    ids=lambda change: next(iter(change)),
)
def test_penalties_and_biases_change_the_logits(client, change):
    change = {"logit_bias": {"31": -100}} | change

    found = client.completions.create(**GREEDY | {"prompt": "a", "max_tokens": 20} | change).choices[0].text

    assert found == penalized("a", 20, change)
    assert found != penalized("a", 20, {"logit_bias": {"31": -100}})


def test_stop_tokens_are_the_models_and_the_requests_and_wait_for_min_tokens(client):
    letters = GREEDY | {"prompt": "hello", "max_tokens": 12}  # the model ends it at once
    ended = client.completions.create(**letters)
    ignored = client.completions.create(**letters, extra_body={"ignore_eos": True})
    later = client.completions.create(**letters, extra_body={"min_tokens": 3})
    text = greedy_text(PROMPT, 12)
    stopped = client.completions.create(
        **letters | {"prompt": PROMPT}, extra_body={"stop_token_ids": LETTERS.encode(text[4])}
    )

    assert ended.usage.completion_tokens == 1
    assert ignored.usage.completion_tokens == 12
    assert later.usage.completion_tokens >= 3
    assert stopped.choices[0].text == text[: text.index(text[4])]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("further", [{"top_k": -1, "top_p": 0}, {"top_k": 1, "top_p": 1.0}])
def test_least_top_p_and_top_k_leave_the_likeliest_token(client, further):
    drawn = client.completions.create(**GREEDY | {"temperature": 9.0}, extra_body=further)

    assert drawn.choices[0].text == greedy_text(PROMPT, 8)


@pytest.mark.slow
def test_sampling_fields_of_vllm_are_supported(client):
    further = {"repetition_penalty": 1.7}
    asked = GREEDY | {"prompt": "a", "max_tokens": 20, "logit_bias": {"31": -100}}

    found = client.completions.create(**asked, extra_body=further).choices[0].text

    assert found == penalized("a", 20, further | {"logit_bias": {"31": -100}})
    likeliest = client.completions.create(**GREEDY | {"temperature": 9.0}, extra_body={"min_p": 1.0}).choices[0].text
    assert likeliest == greedy_text(PROMPT, 8)


def test_models_are_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="there is no model 'some/other'; this server has 'tiny'") as raised:
        client.models.retrieve("some/other")
    assert raised.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format='json_object' is not supp"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice='required' is not supported; remove it"),
        ({"messages": []}, "messages", "messages must be a list of at least one message"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages", "the chat template refuses the messages: who"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0] has 5 as its content; expected text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "the model 'tiny' reads text alone; remove the image in messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "a" * 60}]}, "messages", "the messages have 63 tokens; expected"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs=2 needs logprobs=true"),
        ({"temperature": -1}, "temperature", "temperature=-1 must be 0 or more, and finite"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0 must be an integer, 1 or more"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has 'x': 1; expected a token id up to 31"),
        ({"tools": {}}, "tools", "tools must be a list of objects"),
        (
            {"extra_body": {"chat_template_kwargs": [1]}},
            "chat_template_kwargs",
            "chat_template_kwargs=[1] must be an object",
        ),
        ({"extra_body": {"chat_template_kwargs": {"tools": "x"}}}, "chat_template_kwargs", "'tools' is given to"),
        ({"extra_body": {"reasoning_effort": "much"}}, "reasoning_effort", "reasoning_effort='much' must be one of"),
        (
            {"extra_body": {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}},
            "reasoning_effort",
            "reasoning_effort='low' is 'high' in chat_template_kwargs; remove one of them",
        ),
        ({"extra_body": {"guided_json": {}}}, "guided_json", "guided_json={} is not supported; remove it"),
        ({"extra_body": {"temprature": 1}}, "temprature", "temprature=1 is not supported; use temperature, or remove"),
        (
            {"extra_body": {"stop_token_ids": [32]}},
            "stop_token_ids",
            "must be a list of up to 64 token ids from 0 to 31",
        ),
        ({"extra_body": {"min_tokens": 9}}, "min_tokens", "min_tokens=9 must be an integer from 0 to max_tokens=8"),
    ],
)
def test_chat_that_cannot_be_answered_is_refused_in_the_clients_own_words(client, change, param, text):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**CHAT | change)

    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"
    assert text in raised.value.message


def test_chat_of_a_model_without_a_template_is_refused(engine):
    with TestClient(make_app(CompletionService(engine, LETTERS, model="tiny")), base_url="http://localhost") as http:
        error = http.post("/v1/chat/completions", json=CHAT).json()["error"]

    assert error["message"] == "the model 'tiny' has no chat template, which messages need; use /v1/completions"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/v1/nothing", 404, "unknown_url"), ("GET", "/v1/completions", 405, "method_not_allowed")],
)
def test_unknown_routes_are_answered_by_an_error_in_json(http, method, path, status, code):
    response = http.request(method, path)

    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert path in error["message"]


def test_page_needs_nothing_from_elsewhere(http):
    response = http.get("/")

    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "v1/chat/completions" in response.text
    assert not [word for word in ("http://", "https://", "src=", "@import") if word in response.text]


def test_metrics_tell_the_time_to_the_first_token_and_the_queue(http, client):
    client.completions.create(**GREEDY)

    lines = http.get("/metrics").text.splitlines()

    assert 'nxd_time_to_first_token_seconds_bucket{le="+Inf"} 1' in lines
    assert "nxd_time_to_first_token_seconds_count 1" in lines
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values["nxd_time_to_first_token_seconds_sum"] > 0
    assert values["nxd_tokens_per_second"] > 0
    assert values['nxd_sequences{state="waiting"}'] == 0


def mixed_requests(number):
    rng = random.Random(0)
    for index in range(number):
        prompt = rng.choice(["", "the cat sat on "]) + "".join(rng.choices(serve_tiny.LETTERS, k=rng.randrange(1, 12)))
        common = {"max_tokens": rng.randrange(1, 16), "model": "tiny", "stream": rng.random() < 0.5, "seed": index}
        common |= {"temperature": rng.choice([0, 0, 2.0]), "n": rng.choice([1, 1, 2])}
        common |= {"presence_penalty": rng.choice([0, 1.0])}
        if rng.random() < 0.5:
            yield "/v1/completions", common | {"prompt": prompt, "logprobs": 1, "echo": rng.random() < 0.3}
        else:
            yield "/v1/chat/completions", common | {"messages": [{"role": "user", "content": prompt}]}


def answered(http, path, body):
    """Return the choices, whole or streamed; log-probabilities are rounded, because a batch sums in another order."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        return [json.dumps(rounded(choice), sort_keys=True) for choice in response.json()["choices"]]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    choices = [json.dumps(rounded(choice), sort_keys=True) for e in events for choice in json.loads(e)["choices"]]
    return sorted(choices, key=lambda choice: json.loads(choice)["index"])


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 6) if isinstance(value, float) else value


@pytest.mark.slow
def test_64_mixed_concurrent_requests_are_answered_as_if_alone(http):
    requests = list(mixed_requests(64))
    alone = [answered(http, *request) for request in requests]

    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda request: answered(http, *request), requests))

    assert together == alone


def test_prompts_with_equal_prefixes_share_their_cache(engine):
    from nxd_trace.generation import SamplingSettings

    prompt = torch.randint(0, 31, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    first = engine.add(prompt, SamplingSettings(max_new_tokens=2))
    while not engine.is_idle:
        engine.step()

    second = engine.add([*prompt[:36], 1, 2], SamplingSettings(max_new_tokens=2))
    while not engine.is_idle:
        engine.step()

    assert first.num_cached == 0
    assert second.num_cached == 32  # whole blocks of 16
    assert second.tokens == tiny_decoder.plain_greedy([*prompt[:36], 1, 2], 2)


@pytest.mark.parametrize(
    ("shared_prefixes", "headers", "cached"),
    [
        (False, {}, 32),
        (False, {"Authorization": "Bearer other"}, 0),
        (True, {"Authorization": "Bearer other"}, 32),
    ],
)
def test_cache_of_a_prompt_is_reused_only_for_its_client_unless_prefixes_are_shared(
    engine, shared_prefixes, headers, cached
):
    text = "".join(random.Random(f"{shared_prefixes}{headers}").choice("abcdefgh") for _ in range(40))
    asked = GREEDY | {"prompt": text, "max_tokens": 1}
    service = CompletionService(engine, LETTERS, model="tiny", shared_prefixes=shared_prefixes)
    with TestClient(make_app(service), base_url="http://localhost") as http:
        http.post("/v1/completions", json=asked)
        found = [
            http.post("/v1/completions", json=asked | salt, headers=headers).json()["usage"]["prompt_tokens_details"]
            for salt in ({}, {"cache_salt": "another"})
        ]

    assert found == [{"cached_tokens": cached}, {"cached_tokens": 0}]


def test_long_prompt_is_processed_in_chunks_while_others_get_tokens(engine):
    from nxd_trace.generation import SamplingSettings

    short = engine.add([3], SamplingSettings(max_new_tokens=10))
    engine.step()
    long = engine.add(list(range(30)) + [1] * 8, SamplingSettings(max_new_tokens=2))

    lengths = []
    while not long.tokens:
        engine.step()
        lengths.append(len(short.tokens))
    while not engine.is_idle:
        engine.step()

    assert lengths == [2, 3]  # a token for the short one beside two parts, and beside the third
    assert long.tokens == tiny_decoder.plain_greedy([*range(30), *[1] * 8], 2)
