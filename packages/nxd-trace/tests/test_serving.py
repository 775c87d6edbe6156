"""The server answers like OpenAI's completions API, and rejects unsupported requests."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
import serve_tiny
import tiny_decoder
from nxd_trace.generation import choose_token
from nxd_trace.serving import CompletionService, ServerLimits, make_app
from nxd_trace.serving.detokenizer import IncrementalDetokenizer, StopString
from starlette.requests import Request as StarletteRequest
from starlette.testclient import TestClient

GREEDY = {"prompt": "once upon", "max_tokens": 12, "temperature": 0}
JSON = {"Content-Type": "application/json"}
LETTERS = serve_tiny.Letters()


def expected_tokens(prompt: str, new_tokens: int) -> list[int]:
    """Return the tokens up to the end of the text."""
    tokens = tiny_decoder.plain_greedy(LETTERS.encode(prompt), new_tokens)
    return tokens[: tokens.index(31)] if 31 in tokens else tokens


TEXT = LETTERS.decode(expected_tokens("once upon", 12))


@pytest.fixture
def client(tiny_generator):
    limits = ServerLimits(max_waiting=4, max_prompts=3, max_body_bytes=500)
    with TestClient(
        make_app(CompletionService(tiny_generator.engine, LETTERS, model="tiny", limits=limits)),
        base_url="http://localhost",
    ) as client:
        yield client
    assert tiny_generator.engine.is_idle


def complete(client: TestClient, **body):
    return client.post("/v1/completions", json=GREEDY | body)


def test_a_completion_has_the_greedy_text_and_counts_its_tokens(client):
    response = complete(client)

    assert response.status_code == 200
    body = response.json()
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": choice["finish_reason"]}
    assert body["usage"]["prompt_tokens"] == 9
    assert body["usage"]["total_tokens"] == 9 + body["usage"]["completion_tokens"]
    assert (body["object"], body["model"]) == ("text_completion", "tiny")


def test_prompt_begins_as_the_tokenizer_begins_a_text(tiny_generator):
    class WithPrefix(serve_tiny.Letters):
        prefix = (3,)

    with TestClient(
        make_app(CompletionService(tiny_generator.engine, WithPrefix(), model="tiny")), base_url="http://localhost"
    ) as client:
        bodies = [complete(client, prompt=prompt).json() for prompt in ("once upon", "donce upon", [14])]

    assert [body["usage"]["prompt_tokens"] for body in bodies] == [10, 10, 1]
    assert bodies[0]["choices"][0]["text"] == LETTERS.decode(expected_tokens("donce upon", 12))


def test_stop_string_that_spells_a_special_token_stops_there(tiny_generator):
    tokens = expected_tokens("once upon", 12)

    class Hides(serve_tiny.Letters):
        """A tokenizer that omits the fifth token of the answer, a special token."""

        def encode(self, text):
            return [tokens[4]] if text == "<|mark|>" else super().encode(text)

        def decode(self, ids):
            return super().decode([token for token in ids if token != tokens[4]])

    with TestClient(
        make_app(CompletionService(tiny_generator.engine, Hides(), model="tiny")), base_url="http://localhost"
    ) as client:
        body = complete(client, stop=["<|mark|>", "#"]).json()

    end = tokens.index(tokens[4])
    assert body["choices"][0]["text"] == LETTERS.decode(tokens[:end])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == end + 1


def test_prompts_of_one_request_are_completed_each(client):
    prompts = ["once upon", "a", "hello"]  # the last ends at once

    choices = complete(client, prompt=prompts).json()["choices"]

    assert [it["text"] for it in choices] == [LETTERS.decode(expected_tokens(prompt, 12)) for prompt in prompts]


def test_prompts_may_be_token_ids(client):
    ids = LETTERS.encode("once upon")

    assert complete(client, prompt=ids).json()["choices"] == complete(client, prompt=[ids]).json()["choices"]
    assert complete(client, prompt=ids).json()["choices"][0]["text"] == TEXT


def test_a_stream_sends_pieces_and_then_done(client):
    response = complete(client, stream=True)

    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert len(choices) > 3
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]


def test_token_ids_are_returned_with_the_one_that_ends_the_text(client):
    tokens = tiny_decoder.plain_greedy(LETTERS.encode("hello"), 12)
    assert 31 in tokens  # the end of a text
    tokens = tokens[: tokens.index(31) + 1]

    asked = {"prompt": "hello", "return_token_ids": True}
    (choice,) = complete(client, **asked).json()["choices"]
    events = complete(client, **asked, stream=True).text.split("\n\n")

    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert choice["token_ids"] == [token for it in choices for token in it["token_ids"]] == tokens


def test_a_completion_ends_before_its_stop_string(client):
    stop = TEXT[3:5]

    (choice,) = complete(client, stop=[stop, "never"]).json()["choices"]

    assert choice["text"] == TEXT[: TEXT.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_equal_seeds_give_equal_samples(client):
    drawn = [complete(client, temperature=9.0, seed=seed).json()["choices"][0]["text"] for seed in (1, 1, 2)]

    assert drawn[0] == drawn[1] != drawn[2]


def test_prompts_of_one_request_have_seeds_of_their_own(client):
    drawing = {"temperature": 9.0, "prompt": "a"}
    alone = [complete(client, **drawing, seed=seed).json()["choices"][0]["text"] for seed in (7, 8)]

    together = complete(client, **drawing | {"prompt": ["a", "a"]}, seed=7).json()["choices"]

    assert [choice["text"] for choice in together] == alone
    assert alone[0] != alone[1]


def test_requests_of_several_clients_share_the_batch(client):
    prompts = ["hello", "a", "the fox", "so it goes."]
    found = {}
    threads = [
        threading.Thread(target=lambda p=p: found.update({p: complete(client, prompt=p).json()})) for p in prompts
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for prompt in prompts:
        assert found[prompt]["choices"][0]["text"] == LETTERS.decode(expected_tokens(prompt, 12))


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"model": "huge"}, 404, "there is no model 'huge'; this server has 'tiny'"),
        ({"prompt": None}, 400, "prompt must be a string"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": [1, 99]}, 400, "token id 99 is outside the vocabulary 0..31"),
        ({"prompt": ["a"] * 4}, 400, "has 4 prompts; send 3 or fewer"),
        ({"max_tokens": 40}, 400, "more than the max_length=40"),
        ({"max_tokens": "many"}, 400, "max_tokens='many' must be of type int"),
        ({"temperature": -1}, 400, "temperature=-1 must be 0 or more"),
        ({"temperature": 10**320}, 400, "must be 0 or more, and finite"),
        ({"prompt": "ABC"}, 400, "the prompt has no tokens: substring not found"),
        ({"n": 4}, 400, "n=4 must be from 1 to 3"),
        ({"n": 2, "best_of": 1}, 400, "best_of=1 is less than n=2"),
        ({"best_of": 2, "prompt": ["a", "b"]}, 400, "asks for 4 texts; ask for 3 or fewer"),
        ({"best_of": 2, "stream": True}, 400, "best_of=2 cannot be streamed"),
        ({"max_tokens": 0}, 400, "max_tokens=0 must be an integer, 1 or more"),
        ({"logprobs": 21}, 400, "logprobs=21 must be from 0 to 20"),
        ({"logit_bias": {"32": 1}}, 400, "logit_bias has '32': 1; expected a token id up to 31"),
        ({"logit_bias": {"1": 101}}, 400, "a number from -100 to 100"),
        ({"presence_penalty": 3}, 400, "presence_penalty=3 must be from -2 to 2"),
        ({"suffix": "!"}, 400, "suffix='!' is not supported; remove it"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options must be an object, and needs stream"),
        ({"stop": [""]}, 400, "stop must be a string or up to 4 strings"),
        ({"prompt": "a" * 600}, 413, "more than 500 bytes"),
    ],
)
def test_requests_that_cannot_be_done_are_refused(client, change, status, text):
    response = complete(client, **change)

    assert response.status_code == status
    assert text in response.json()["error"]["message"]


def test_an_empty_prompt_is_blamed_on_the_prompt(client):
    assert complete(client, prompt="").json()["error"]["param"] == "prompt"


def test_extreme_sampling_settings_are_answered_and_the_server_continues(client):
    likeliest = complete(client, temperature=1e-50).json()["choices"][0]["text"]

    assert likeliest == complete(client, temperature=1, top_p=1e-50).json()["choices"][0]["text"] == TEXT
    assert client.get("/health").status_code == 200


def test_an_error_while_choosing_a_token_fails_only_that_prompt(client, monkeypatch):
    def choose(logits, settings, generator, **texts):
        if settings.temperature == 0.5:
            raise ArithmeticError("a number too odd")
        return choose_token(logits, settings, generator, **texts)

    monkeypatch.setattr("nxd_trace.generation.sequence.choose_token", choose)

    failed = complete(client, temperature=0.5)

    assert (failed.status_code, failed.json()["error"]["message"]) == (503, "the model failed: a number too odd")
    assert complete(client).json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("body", [b"prompt=once", b"[" * 100, json.dumps(GREEDY).encode("utf-16")])
def test_a_body_that_is_no_json_is_refused(tiny_generator, body):
    with TestClient(
        make_app(CompletionService(tiny_generator.engine, LETTERS, model="tiny")), base_url="http://localhost"
    ) as client:
        response = client.post("/v1/completions", content=body, headers=JSON)

    assert response.status_code == 400
    assert "the body is not JSON" in response.json()["error"]["message"]


def test_health_models_and_metrics_are_told(client):
    written = complete(client).json()["usage"]["completion_tokens"]
    complete(client, n=0)

    assert client.get("/health").json() == {"status": "ok"}
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    lines = client.get("/metrics").text.splitlines()
    assert 'nxd_requests_total{status="200"} 1' in lines
    assert 'nxd_requests_total{status="400"} 1' in lines
    assert 'nxd_tokens_total{kind="prompt"} 9' in lines
    assert f'nxd_tokens_total{{kind="written"}} {written}' in lines
    assert any(float(line.split()[1]) > 0 for line in lines if line.startswith("nxd_request_seconds_sum"))
    assert 'nxd_sequences{state="waiting"} 0' in lines


def test_text_is_held_back_until_its_characters_are_complete():
    stream = IncrementalDetokenizer(lambda tokens: bytes(tokens).decode(errors="replace"))

    assert [stream.push(byte) for byte in "né!".encode()] == ["n", "", "é", "!"]


def test_text_that_may_start_a_stop_string_is_held_back():
    stream = IncrementalDetokenizer(lambda tokens: bytes(tokens).decode(), stop=[StopString("ab!")])

    assert [stream.push(byte) for byte in b"xaabc"] == ["x", "", "a", "", "abc"]
    assert stream.flush() == ""
    assert [stream.push(byte) for byte in b"ab!"] == ["", "", ""]
    assert stream.stopped


@pytest.fixture
def gated(tiny_generator, monkeypatch):
    """A service whose model takes five steps, enough for a first token, and one more per `gated.permits.release()`."""
    step, permits = tiny_generator.engine.step, threading.Semaphore(5)

    def permitted_step():
        permits.acquire()
        return step()

    monkeypatch.setattr(tiny_generator.engine, "step", permitted_step)
    service = CompletionService(tiny_generator.engine, LETTERS, model="tiny")
    yield SimpleNamespace(service=service, permits=permits)
    permits.release(100)
    service.close()


async def row_is_freed(service) -> None:
    """Wait until the row is free; raises TimeoutError."""
    async with asyncio.timeout(60):
        while service.scheduler.num_running:
            await asyncio.sleep(0)


def test_an_abandoned_stream_frees_its_row(gated):
    async def read_one_piece():
        pieces = (await gated.service.start(json.dumps(GREEDY | {"max_tokens": 30}).encode())).chunks()
        await anext(pieces)
        await pieces.aclose()
        gated.permits.release()  # for the step that is under way
        await row_is_freed(gated.service)

    asyncio.run(read_one_piece())


def test_a_client_that_disconnects_frees_its_row(gated):
    """Drive the endpoint like a server: the client sends its request, and disconnects during the answer."""
    endpoint = next(route for route in make_app(gated.service).routes if route.path == "/v1/completions").endpoint
    bodies = [json.dumps(GREEDY | {"max_tokens": 30}).encode()]

    async def receive():
        if bodies:
            return {"type": "http.request", "body": bodies.pop()}
        while not gated.service.scheduler.num_running:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def request():
        response = await endpoint(StarletteRequest({"type": "http", "method": "POST", "headers": []}, receive))
        gated.permits.release()
        await row_is_freed(gated.service)
        return response

    assert asyncio.run(request()).status_code == 499
    assert 'nxd_requests_total{status="499"} 1' in gated.service.metrics_text()
