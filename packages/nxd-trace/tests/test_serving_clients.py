"""Slow, silent, greedy and malicious clients cost the server little, and other clients nothing."""

import json
import random
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import serve_tiny as program
from nxd_trace.serving import CompletionService, make_app
from nxd_trace.serving.detokenizer import IncrementalDetokenizer, StopString
from starlette.testclient import TestClient
from tiny_server import TinyServer

pytestmark = pytest.mark.sample(12)  # each takes its time

LETTERS = program.Letters()
GREEDY = {"prompt": "once upon", "max_tokens": 12, "temperature": 0}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def plain_text_before(text, stops):
    """Return the text up to the stop string that completes first, and of several the longest."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        return text
    whole = text[: min(ends)]
    return whole[: len(whole) - max(len(stop) for stop in stops if whole.endswith(stop))]


def streamed_text(tokens, stops, cut):
    stream = IncrementalDetokenizer(
        lambda tokens: b"".join(cut[token] for token in tokens).decode(errors="replace"), stops
    )
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            return "".join(pieces)
    return "".join(pieces) + stream.flush()


def test_stop_strings_are_found_across_tokens():
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("aabé😀") for _ in range(rng.randrange(60)))
        stops = ["".join(rng.choice("aabé") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(2))]
        left, cut = text.encode(), []
        while left:
            size = rng.randrange(1, 7)
            cut.append(left[:size])
            left = left[size:]

        written = streamed_text(range(len(cut)), [StopString(stop) for stop in stops], cut)

        assert written == plain_text_before(text, stops), (text, stops, cut)


def test_a_token_is_decoded_with_few_others_however_long_the_text_and_however_broken_its_characters():
    sizes = []

    def decode(tokens):
        sizes.append(len(tokens))
        return bytes(tokens).decode(errors="replace")

    for byte in (b"a", b"\x80"):
        stream = IncrementalDetokenizer(decode)
        text = "".join(stream.push(byte[0]) for _ in range(2000)) + stream.flush()
        assert text == (byte * 2000).decode(errors="replace")
    assert max(sizes) < 200


@pytest.fixture
def client(tiny_generator):
    with TestClient(
        make_app(CompletionService(tiny_generator.engine, LETTERS, model="tiny")), base_url="http://localhost"
    ) as client:
        yield client


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        (
            {"stop": "x" * 1001},
            400,
            "stop must be a string or up to 4 strings, none empty or longer than 1000 characters",
        ),
        ({"stop": ["x"] * 5}, 400, "stop must be a string or up to 4 strings"),
        ({"stop": 0}, 400, "stop must be a string or up to 4 strings"),
        ({"stream": "yes"}, 400, "stream='yes' must be true or false"),
        ({"prompt": "a" * 2000}, 400, "a prompt has 2000 characters, too many for the model's max_length=40 tokens"),
        ({"prompt": [1] * 41}, 400, "a prompt has 41 tokens, more than the model's max_length=40"),
        ({"prompt": ["a"] * 17}, 400, "the request has 17 prompts; send 16 or fewer"),
        ({"prompt": [[1] * 40] * 30}, 400, "the body has more than 896 values"),
        ({"unknown": [1] * 895}, 400, "the body has more than 896 values"),  # with those of GREEDY
        ({"unknown": [1] * 894}, 400, "unknown=[1, 1, 1, 1, 1, 1, ...] is not supported"),
        ({"unknown": [[]] * 300}, 400, "the body has more than 288 strings, lists and objects"),
        ({"model": "m" * 100_000}, 404, "there is no model 'mmmmmmmmmmmm...mmmmmmmmmmmmm'; this server has 'tiny'"),
        ({"suffix": ["s" * 100_000]}, 400, "suffix=['ssssssssssss...sssssssssssss'] is not supported"),
        ({"temperature": {"t": "t" * 100_000}}, 400, "must be of type float"),
    ],
)
def test_fields_beyond_their_limits_are_refused_in_a_short_answer(client, change, status, text):
    response = client.post("/v1/completions", json=GREEDY | change)

    assert response.status_code == status
    assert text in response.json()["error"]["message"]
    assert len(response.content) < 500


def test_a_prompt_is_tokenized_while_the_server_answers_others(tiny_generator):
    begun, go_on, answered = threading.Event(), threading.Event(), []

    class SlowLetters(program.Letters):
        def encode(self, text):
            begun.set()
            answered.append(go_on.wait(10))
            return super().encode(text)

    with TestClient(
        make_app(CompletionService(tiny_generator.engine, SlowLetters(), model="tiny")), base_url="http://localhost"
    ) as client:
        asking = threading.Thread(target=lambda: client.post("/v1/completions", json=GREEDY))
        asking.start()
        begun.wait()
        assert client.get("/health").status_code == 200
        go_on.set()
        asking.join()

    assert answered == [True]


def test_a_client_is_answered_while_the_chat_template_of_another_loops(tiny_generator, deadline):
    begun, go_on, answered_meanwhile = threading.Event(), threading.Event(), []

    class LoopingTemplate:
        def encode_prompt(self, messages, tools=None, variables=None):
            if messages[0]["content"] == "loop":
                begun.set()
                answered_meanwhile.append(go_on.wait(deadline(10)))
                raise ValueError("it takes too long")
            return LETTERS.encode(messages[0]["content"])

    def ask(user, content):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        return client.post("/v1/chat/completions", json=body, headers={"Authorization": user}).status_code

    service = CompletionService(tiny_generator.engine, LETTERS, model="tiny", chat=LoopingTemplate())
    with TestClient(make_app(service), base_url="http://localhost") as client, ThreadPoolExecutor() as clients:
        hostile = [clients.submit(ask, "hostile", "loop") for _ in range(5)]
        begun.wait()
        patient = ask("patient", "once upon")
        go_on.set()
        refused = [it.result() for it in hostile]

    assert (patient, refused) == (200, [400] * 5)
    assert answered_meanwhile[0]


PARTS = [
    "[]",
    "{}",
    '""',
    "300",
    "1e9",
    '"ab"',
    "[0]",
    '{"a":1}',
    "null",
    '"\\ud83d\\ude00"',
    '"[é😀"',
    "-0.5",
    "1" * 400,
]


def hostile_body(rng, num_bytes):
    """Return valid or almost valid JSON with one kind of part or all kinds."""
    parts = rng.choice([[part] for part in PARTS] + [PARTS])
    values, size = [], 0
    while size < num_bytes:
        values.append(rng.choice(parts))
        size += len(values[-1]) + 1
    field = rng.choice(["prompt", "stop", "model", "max_tokens", "seed", "stream", "logit_bias", "other"])
    body = f'{{"{field}": [{",".join(values)}]}}'
    if rng.random() < 0.3:
        body = body[: rng.randrange(len(body))]
    if rng.random() < 0.2:
        body = rng.choice(["[", '{"a":', '"\\', "\\", "\x00", '"']) * (num_bytes // 2)
    return body.encode(rng.choice(["utf-8", "utf-8", "utf-16"]), "surrogatepass")


@pytest.mark.parametrize("seed", range(2))
def test_random_requests_to_every_endpoint_are_answered_within_ten_times_their_memory(client, seed):
    rng = random.Random(seed)
    slack = 1 << 19  # of the client and the server, whatever is sent
    client.get("/health")
    tracemalloc.start()
    try:
        for _ in range(25):
            body = hostile_body(rng, rng.choice([10, 1000, 1 << 18]))
            method = rng.choice(["POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD"])
            path = rng.choice(
                ["/v1/completions"] * 3 + ["/v1/models", "/health", "/metrics", "/%00", "/v1/" + "x" * 999]
            )
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()

            response = client.request(method, path, content=body)

            _, peak = tracemalloc.get_traced_memory()
            assert 200 <= response.status_code < 500, (method, path, body[:100])
            assert peak - before < 10 * len(body) + slack, (method, path, len(body), body[:100])
    finally:
        tracemalloc.stop()
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("seed", range(2))
def test_random_fields_are_answered_and_the_server_continues(client, seed):
    rng = random.Random(seed)
    values = [
        None,
        True,
        -1,
        0,
        1,
        2**63,
        10**300,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "a",
        "\ud800",
        [],
        ["a"],
        {},
        [[]],
    ]
    fields = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "n", "model", "suffix"]
    for _ in range(40):
        body = {"prompt": "a", "max_tokens": 2} | {rng.choice(fields): rng.choice(values) for _ in range(3)}

        response = client.post(
            "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )

        assert response.status_code in (200, 400, 404), (body, response.text)
    assert client.post("/v1/completions", json=GREEDY).status_code == 200


@pytest.mark.parametrize("change", [{"temperature": 10**30}, {"temperature": 5e-324}, {"top_k": 10**30}])
def test_numbers_of_any_size_do_not_fail_the_model(client, change):
    response = client.post("/v1/completions", json=GREEDY | {"temperature": 1.0} | change)

    assert response.status_code == 200, response.text
    assert client.get("/health").json() == {"status": "ok"}


@pytest.fixture(scope="module")
def impatient():
    """A server with a client timeout of one second."""
    with TinyServer({"client_timeout": 1.0, "max_body_bytes": 100_000}) as server:
        yield server


@pytest.mark.sample(2)
@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD + b"X-Slow: "])
def test_a_connection_that_begins_no_request_is_closed(impatient, deadline, sent):
    with impatient.connect(deadline(20)) as client:
        client.sendall(sent)

        assert client.recv(1) == b""


def test_a_body_that_does_not_come_is_answered_and_the_connection_closed(impatient, deadline):
    with impatient.connect(deadline(20)) as client:
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")

        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))

    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the request was not received within 1 s" in answer


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere", b"/health"])
def test_the_body_of_a_refused_request_is_not_read_for_ever(impatient, deadline, path):
    with impatient.connect(deadline(20)) as client:
        client.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % path
            + b"Content-Length: 1000000000000\r\n\r\n"
        )
        answer = client.recv(1 << 16)
        sent = 0
        with suppress(ConnectionError):
            while sent < 1 << 28:
                sent += client.send(bytes(1 << 16))

    assert answer.split()[1] in (b"413", b"404", b"405")
    assert sent < 1 << 28


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", b"400"),  # a proxy may believe either of them
        (b"X-Long: %s\r\n" % (b"a" * 17_000), b"431"),
    ],
    ids=["two lengths", "long headers"],
)
def test_request_with_invalid_headers_is_refused_and_its_connection_closed(impatient, deadline, headers, status):
    with impatient.connect(deadline(20)) as client:
        client.sendall(HEAD + headers + b"\r\n0\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))

    assert answer.split()[1] == status
    assert b"connection: close" in answer.lower()


def test_a_client_that_does_not_wait_for_answers_gets_one(impatient, deadline):
    with impatient.connect(deadline(20)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        answers = b"".join(iter(lambda: client.recv(1 << 16), b""))

    assert answers.count(b"HTTP/1.1 200") == 1


def test_a_client_that_waits_for_answers_gets_all_on_one_connection(impatient, deadline):
    with impatient.connect(deadline(20)) as client:
        for _ in range(20):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += client.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_client_that_receives_nothing_is_disconnected(impatient, deadline):
    def ask_for_ever(client):
        while True:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)

    with impatient.connect(deadline(20)) as client, pytest.raises(ConnectionError):
        ask_for_ever(client)


@pytest.fixture(scope="module")
def small():
    """A server with at most three connections."""
    with TinyServer({"max_connections": 3}) as server:
        yield server


def test_a_connection_beyond_the_maximum_replaces_the_longest_idle(small, deadline):
    with ExitStack() as stack:
        silent = [stack.enter_context(small.connect(deadline(20))) for _ in range(3)]
        with small.post(GREEDY, deadline(60)) as answer:
            assert answer.status == 200

        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""


def test_connections_beyond_those_that_are_busy_are_refused(small, deadline):
    with ExitStack() as stack:
        for _ in range(3):
            busy = stack.enter_context(small.connect(deadline(20)))
            busy.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
            assert busy.recv(1 << 10).startswith(b"HTTP/1.1 100")  # the application waits for the body

        with small.connect(deadline(20)) as client:
            assert client.recv(1 << 10).startswith(b"HTTP/1.1 503")


def test_good_requests_are_answered_beside_hostile_ones(impatient, deadline):
    """The light form of `tools/bench/hostile_clients.py`."""
    hostile = [
        b"",
        HEAD,
        HEAD + b"Content-Length: 99\r\n\r\n{",
        b"\x00" * 999,
        HEAD + b"Content-Length: 99999999\r\n\r\n",
    ]
    with ExitStack() as stack:
        for number in range(100):
            client = stack.enter_context(impatient.connect(deadline(20)))
            client.sendall(hostile[number % len(hostile)])
        texts = set()
        for _ in range(5):
            with impatient.post(GREEDY, deadline(60)) as answer:
                assert answer.status == 200
                texts.add(json.load(answer)["choices"][0]["text"])
        assert len(texts) == 1
