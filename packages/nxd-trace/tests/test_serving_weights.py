"""Live updates of a server's weights: whole or not at all, between requests, and only from senders with the token."""

import asyncio
import json
import re
import threading
import time

import pytest
import serve_tiny
import tiny_decoder
import torch
from deadly_weights import DeadlyWeights
from nxd_trace.generation import compile_generator
from nxd_trace.serving import CompletionService, RestartPolicy, UpdateSettings, make_app
from nxd_trace.weights import SafetensorsFiles
from safetensors.torch import save
from starlette.testclient import TestClient

LETTERS = serve_tiny.Letters()
TOKEN = "0123456789abcdef"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SETTINGS = UpdateSettings(TOKEN, max_bytes=1 << 20)
GREEDY = {"prompt": "once upon", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def other_weights(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(it.shape, generator=generator, dtype=it.dtype) for name, it in tiny_decoder.weights().items()
    }


def text_of(weights, monkeypatch, prompt="once upon"):
    """Return the text that the plain decoder writes with these weights."""
    with monkeypatch.context() as patch:
        patch.setattr(tiny_decoder, "weights", lambda: weights)
        return LETTERS.decode(tiny_decoder.plain_greedy(LETTERS.encode(prompt), 12))


SIZES = {"batch_size": 2, "max_length": 40, "prefill_lengths": (4,), "compiler": "export", "progress": False}


@pytest.fixture(scope="module")
def compiled():
    with compile_generator(tiny_decoder.TinyDecoder, **SIZES, inline_weights_to_neff=False) as generator:
        yield generator.engine


@pytest.fixture
def engine(compiled, tmp_path):
    """The tiny decoder with its first weights, before and after the test."""
    yield compiled
    (tmp_path / "first.safetensors").write_bytes(save(tiny_decoder.weights()))
    compiled.replace_weights(SafetensorsFiles(tmp_path / "first.safetensors"))


@pytest.fixture
def service(engine):
    service = CompletionService(engine, LETTERS, model="tiny", updates=SETTINGS, shared_prefixes=True)
    yield service
    service.close()


@pytest.fixture
def client(service):
    with TestClient(make_app(service), base_url="http://localhost") as client:
        yield client


def start(client, **body):
    return client.post("/start_weight_update", json=body, headers=HEADERS).json()["update_id"]


def send(client, update, tensors):
    content = save(tensors) if isinstance(tensors, dict) else tensors
    headers = HEADERS | {"Content-Type": "application/octet-stream"}
    return client.post("/update_weights", params={"update_id": update}, content=content, headers=headers)


def finish(client, update):
    return client.post("/finish_weight_update", json={"update_id": update}, headers=HEADERS)


def update(client, weights, **body):
    """Send each tensor in a bucket of its own, and finish."""
    started = start(client, **body)
    for name, tensor in weights.items():
        assert send(client, started, {name: tensor}).json() == {"names": [name]}
    return finish(client, started)


def complete(client, **body):
    return client.post("/v1/completions", json=GREEDY | body).json()


def text(client, **body):
    return complete(client, **body)["choices"][0]["text"]


def message(response):
    return response.json()["error"]["message"]


def test_updated_server_answers_with_the_new_weights_and_their_version(client, monkeypatch):
    before = complete(client)
    weights = other_weights()

    response = update(client, weights, version="step 7")

    after = complete(client)
    assert response.json() == {"weights_version": "step 7"}
    assert (before["weights_version"], after["weights_version"]) == ("0", "step 7")
    assert before["choices"][0]["text"] == text_of(tiny_decoder.weights(), monkeypatch)
    assert after["choices"][0]["text"] == text_of(weights, monkeypatch) != before["choices"][0]["text"]
    assert client.get("/health").json() == {"status": "ok", "weights_version": "step 7"}
    assert client.get("/v1/models/tiny").json()["weights_version"] == "step 7"
    assert update(client, other_weights(2)).json() == {"weights_version": "2"}


def test_prefixes_computed_with_the_old_weights_are_not_used(client):
    def cached():
        return complete(client, prompt="a" * 17)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached() > 0) == (0, True)
    update(client, other_weights())

    assert cached() == 0


def test_chats_and_streams_say_the_version(client):
    update(client, other_weights(), version="v")
    events = client.post("/v1/completions", json=GREEDY | {"stream": True}).text.split("\n\n")

    versions = [json.loads(it.removeprefix("data: "))["weights_version"] for it in events[:-2]]
    assert len(versions) > 3
    assert set(versions) == {"v"}


@pytest.fixture
def gated(engine, monkeypatch):
    """A semaphore with a permit for each step of the model."""
    step, permits = engine.step, threading.Semaphore(0)

    def permitted_step():
        permits.acquire()
        return step()

    monkeypatch.setattr(engine, "step", permitted_step)
    yield permits
    permits.release(1000)


def test_begun_requests_finish_on_the_old_weights_and_later_ones_start_on_the_new(
    service, gated, tmp_path, monkeypatch
):
    """Three prompts of one request on two rows: the third, which waits when the update comes, is of the old version."""
    weights = other_weights()
    (tmp_path / "model.safetensors").write_bytes(save(weights))

    async def run():
        first = await service.start(json.dumps(GREEDY | {"prompt": ["once upon"] * 3}).encode())
        chunks = first.chunks()
        gated.release(6)
        await anext(chunks)  # it has begun
        done = service.scheduler.replace_weights(SETTINGS.open_folder(tmp_path), "new")
        later = await service.start(json.dumps(GREEDY).encode())
        assert not done.done()
        gated.release(1000)
        texts = ["", "", ""]
        async for chunk in chunks:
            texts[chunk.index] += chunk.text
        return texts, first.formatter.usage_event({}), await later.response(), await asyncio.wrap_future(done)

    texts, event, later, version = asyncio.run(run())

    old = text_of(tiny_decoder.weights(), monkeypatch)
    assert texts[1:] == [old, old]
    assert (event["weights_version"], later["weights_version"], version) == ("0", "new", "new")
    assert later["choices"][0]["text"] == text_of(weights, monkeypatch)


def without(name):
    weights = other_weights()
    weights.pop(name)
    return weights


WRONG = {
    "missing": (without("mix"), "mix is missing"),
    "renamed": (without("mix") | {"blend": other_weights()["mix"]}, "mix is missing"),
    "shape": (other_weights() | {"mix": torch.zeros(3, 3)}, r"mix has shape \[3, 3\], the model needs \[16, 16\]"),
    "dtype": (
        other_weights() | {"mix": torch.zeros(16, 16, dtype=torch.int64)},
        "mix has dtype int64, the model needs",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(client, what):
    weights, expected = WRONG[what]
    before = complete(client)

    response = update(client, weights)

    assert response.status_code == 400
    assert re.search(expected, message(response)), message(response)
    assert "still of version '0'" in message(response)
    after = complete(client)
    assert (after["choices"], after["weights_version"]) == (before["choices"], "0")
    assert update(client, other_weights()).status_code == 200  # the next one works


def test_buckets_that_are_damaged_repeated_or_too_large_are_refused(client):
    weights = other_weights()
    started = start(client)
    send(client, started, {"mix": weights["mix"]})

    damaged = send(client, started, save({"head": weights["head"]})[:-8])
    repeated = send(client, started, {"mix": weights["mix"]})
    large = send(client, started, {"large": torch.zeros(1 << 20)})

    assert (damaged.status_code, repeated.status_code, large.status_code) == (400, 400, 413)
    assert "not a safetensors file" in message(damaged)
    assert "'mix' is already in this update" in message(repeated)
    assert "/" not in message(damaged).replace("safetensors file", "")  # no path of the server


def test_sender_that_died_leaves_the_old_weights_until_another_starts_anew(client, monkeypatch):
    before = text(client)
    dead = start(client)
    send(client, dead, {"mix": other_weights()["mix"]})
    assert text(client) == before

    response = update(client, other_weights(2))

    assert response.json() == {"weights_version": "1"}
    assert text(client) == text_of(other_weights(2), monkeypatch)
    late = finish(client, dead)
    assert (late.status_code, "is not open" in message(late)) == (409, True)


def test_aborted_update_changes_nothing_and_leaves_no_files(client, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = start(client)
    send(client, started, other_weights())
    assert list(tmp_path.iterdir())

    response = client.post("/abort_weight_update", json={"update_id": started}, headers=HEADERS)

    assert response.status_code == 200
    assert finish(client, started).status_code == 409
    assert complete(client)["weights_version"] == "0"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", ["start_weight_update", "update_weights", "finish_weight_update", "abort_weight_update"]
)
@pytest.mark.parametrize("header", [{}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": b"Bearer \xff"}])
def test_requests_without_the_token_are_refused(client, path, header):
    kind = "application/octet-stream" if path == "update_weights" else "application/json"

    response = client.post(f"/{path}", content=b"{}", headers=header | {"Content-Type": kind})

    assert response.status_code == 401


def test_server_that_was_not_told_to_accept_weights_has_no_such_endpoint(engine):
    with TestClient(make_app(CompletionService(engine, LETTERS, model="tiny")), base_url="http://localhost") as client:
        response = client.post("/start_weight_update", json={}, headers=HEADERS)
        answer = complete(client)

    assert response.status_code == 404
    assert "weights_version" not in answer


def test_worker_that_dies_during_the_swap_leaves_all_of_them_with_the_old_weights():
    settings = UpdateSettings(TOKEN, max_bytes=1 << 20, open_folder=DeadlyWeights)
    policy = {"updates": settings, "restarts": RestartPolicy(first_delay=0)}
    with (
        compile_generator(tiny_decoder.TinyDecoder, **SIZES, tp_degree=2, inline_weights_to_neff=False) as generator,
        TestClient(
            make_app(CompletionService(generator.engine, LETTERS, model="tiny", **policy)), base_url="http://localhost"
        ) as client,
    ):
        before = text(client)

        response = update(client, other_weights())

        while "choices" not in (answer := complete(client)):  # while the workers start
            time.sleep(0.05)
    assert (response.status_code, answer["choices"][0]["text"]) == (503, before)
    assert (
        "rank 1 of 2 in replacing the weights: the worker was killed by SIGKILL; the weights are still of version '0'"
        in message(response)
    )


def test_server_of_a_model_with_inlined_weights_refuses_to_accept_others(tiny_generator):
    with pytest.raises(ValueError, match="inline_weights_to_neff=False to replace them"):
        CompletionService(tiny_generator.engine, LETTERS, model="tiny", updates=SETTINGS)


@pytest.mark.parametrize("token", ["", "short", "with a space in it", "0123456789abcdéf"])
def test_token_that_can_be_guessed_or_is_no_header_is_refused(token):
    with pytest.raises(ValueError, match="use one word of 16 or more"):
        UpdateSettings(token, max_bytes=1)
