"""S3 that throttles, breaks off, or answers with other bytes than were asked for: one line of error, or a retry.

A server of moto plays S3, and what stands before it here spoils its answers.
"""

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Thread
from typing import Any

import pytest
import torch
from nxd_ckpt import CheckpointError, list_checkpoints, load, open_checkpoint, save
from nxd_ckpt.testing import outcomes_on_threads

pytestmark = pytest.mark.slow  # and skipped without moto: nox -s s3

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

OLD, NEW = {"w": torch.arange(1000.0)}, {"w": torch.ones(1000)}
ALWAYS = 10**6
RETRIED = 2  # times that s3fs tries again, at least
DATA, MANIFEST = ".safetensors", "manifest.json"


@dataclass
class FaultyS3:
    """Spoils the next answers to requests of one method for keys that end so.

    Attributes:
        answered: requests of that kind so far.
    """

    application: Application
    url: str = ""
    spoil: Callable[..., Iterable[bytes]] | None = None
    method: str = ""
    ending: str = ""
    times: int = 0
    answered: int = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == self.method and environ["PATH_INFO"].endswith(self.ending):
            self.answered += 1
            if self.spoil is not None and self.answered <= self.times:
                return self.spoil(self.application, environ, start_response)
        return self.application(environ, start_response)

    def fail(self, method: str, ending: str, spoil: Callable[..., Iterable[bytes]], times: int = ALWAYS) -> None:
        self.method, self.ending, self.spoil, self.times, self.answered = method, ending, spoil, times, 0

    def recover(self) -> None:
        self.spoil = None


def whole_answer(application, environ):
    answer = {}

    def start_response(status, headers, exc_info=None):
        answer.update(status=status, headers=dict(headers))

    return answer, b"".join(application(environ, start_response))


def slow_down(application, environ, start_response):
    body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def break_off(application, environ, start_response):
    """Announces all bytes, sends half of them, and closes the connection."""
    answer, body = whole_answer(application, environ)
    start_response(answer["status"], list(answer["headers"].items()))
    return [body[: len(body) // 2]]


def changed(change):
    """Answers with other bytes, whose number is announced rightly."""

    def spoil(application, environ, start_response):
        answer, body = whole_answer(application, environ)
        body = change(body)
        start_response(answer["status"], list((answer["headers"] | {"Content-Length": str(len(body))}).items()))
        return [body]

    return spoil


def ignore_the_range(application, environ, start_response):
    environ.pop("HTTP_RANGE", None)
    return application(environ, start_response)


def do_it_and_fail(application, environ, start_response):
    whole_answer(application, environ)
    return slow_down(application, environ, start_response)


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("s3fs", reason="needs s3fs: pip install 'nxd-ckpt[s3]'")
    moto = pytest.importorskip("moto.server", reason="needs a local S3: pip install 'moto[server]'")
    serving = pytest.importorskip("werkzeug.serving")
    import fsspec.asyn

    fsspec.asyn.get_loop()  # which stays open
    played = FaultyS3(moto.DomainDispatcherApplication(moto.create_backend_app))
    running = serving.make_server("127.0.0.1", 0, played, threaded=True, request_handler=moto.MotoRequestHandler)
    played.url = f"http://127.0.0.1:{running.server_port}"
    thread = Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield played
    running.shutdown()
    thread.join()


@pytest.fixture
def s3(server, monkeypatch, s3_connections):
    """A faulty server with an empty bucket; `s3.root` is a place for checkpoints in it."""
    import fsspec

    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # s3fs tries again by itself
    }.items():
        monkeypatch.setenv(name, value)
    server.recover()
    bucket = f"b-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(bucket)
    server.root = f"s3://{bucket}/runs"
    yield server
    server.recover()


@pytest.mark.parametrize("ending", [DATA, MANIFEST])
@pytest.mark.parametrize("spoil", [slow_down, break_off])
def test_load_from_s3_that_fails_for_a_moment_gets_every_byte(s3, spoil, ending):
    save(s3.root, "t", OLD)
    s3.fail("GET", ending, spoil, times=RETRIED)

    loaded = {"w": torch.zeros(1000)}
    load(s3.root, "t", into=loaded)

    assert torch.equal(loaded["w"], OLD["w"])
    assert s3.answered > RETRIED


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (slow_down, "reduce your request rate"),
        (break_off, "ClientPayloadError"),
        (changed(lambda body: body[:-1]), "the file ends at byte|checksum"),
        (changed(lambda body: b""), "the file ends at byte|checksum"),
        (changed(lambda body: body + b"more"), "more bytes than requested|checksum"),
    ],
    ids=["throttled", "broken off", "a byte short", "nothing", "too much"],
)
def test_load_from_s3_that_goes_on_failing_is_one_line(s3, spoil, message, verify):
    save(s3.root, "t", OLD)
    s3.fail("GET", DATA, spoil)
    loaded = {"w": torch.zeros(1000)}

    with pytest.raises(CheckpointError, match=message) as raised:
        load(s3.root, "t", into=loaded, verify=verify)

    assert "\n" not in str(raised.value)
    assert not loaded["w"].any()
    s3.recover()
    load(s3.root, "t", into=loaded)
    assert torch.equal(loaded["w"], OLD["w"])


def test_load_from_s3_that_ignores_ranges_never_takes_other_bytes(s3):
    save(s3.root, "t", OLD)
    s3.fail("GET", DATA, ignore_the_range)

    with pytest.raises(CheckpointError, match="more bytes than requested"):
        load(s3.root, "t", into={"w": torch.zeros(1000)}, verify=False)  # which reads the tensor's bytes alone


def test_load_from_s3_that_answers_with_other_bytes_is_noticed_by_their_checksum(s3):
    save(s3.root, "t", OLD)
    s3.fail("GET", DATA, changed(lambda body: bytes(len(body))))

    with pytest.raises(CheckpointError, match=r"checksum|header"):
        load(s3.root, "t", into={"w": torch.zeros(1000)})


@pytest.mark.parametrize("ending", [DATA, MANIFEST])
@pytest.mark.parametrize("spoil", [slow_down, do_it_and_fail])
def test_save_to_s3_that_throttles_for_a_moment_is_complete(s3, spoil, ending):
    s3.fail("PUT", ending, spoil, times=RETRIED)

    save(s3.root, "t", OLD)

    assert s3.answered > RETRIED or spoil is do_it_and_fail  # whose put is recognised as done
    checkpoint = open_checkpoint(s3.root, "t")
    assert checkpoint.damage() == []
    assert torch.equal(checkpoint.read("w"), OLD["w"])


@pytest.mark.parametrize("ending", [DATA, MANIFEST])
def test_save_to_s3_that_goes_on_throttling_is_one_line_and_leaves_the_old_checkpoint(s3, ending):
    save(s3.root, "old", OLD, step=1)
    s3.fail("PUT", ending, slow_down)

    with pytest.raises(CheckpointError, match="reduce your request rate") as raised:
        save(s3.root, "new", NEW, step=2)

    assert "\n" not in str(raised.value)
    s3.recover()
    assert [info.tag for info in list_checkpoints(s3.root)] == ["old"]
    assert torch.equal(open_checkpoint(s3.root).read("w"), OLD["w"])
    save(s3.root, "new", NEW, step=2)
    assert torch.equal(open_checkpoint(s3.root).read("w"), NEW["w"])


def test_save_to_s3_whose_upload_of_parts_fails_leaves_no_checkpoint(s3):
    large = {"w": torch.arange(3 * 2**22, dtype=torch.float32)}  # 48 MiB, in parts of 16
    s3.fail("PUT", DATA, slow_down)

    with pytest.raises(CheckpointError, match="reduce your request rate"):
        save(s3.root, "t", large)

    s3.recover()
    assert list_checkpoints(s3.root) == []
    save(s3.root, "t", large)
    assert torch.equal(open_checkpoint(s3.root).read("w"), large["w"])


def test_load_by_two_ranks_of_which_s3_fails_one_raises_on_both(s3):
    save(s3.root, "t", OLD)
    s3.fail("GET", DATA, slow_down)

    outcomes = outcomes_on_threads(
        lambda ranks: load(s3.root, "t", into={"w": torch.zeros(1000)}, process_group=ranks), 2
    )

    assert str(outcomes[0]) == str(outcomes[1])
    assert "reduce your request rate" in str(outcomes[0])
