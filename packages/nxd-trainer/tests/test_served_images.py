"""Images of requests are data URIs, or come from hosts that are listed, within bounds."""

import base64
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from nxd_trace.errors import RequestError
from nxd_trace.generation import PromptInputs
from nxd_trainer import served_images
from nxd_trainer.served_images import MAX_IMAGES, ServedImages

PIXELS = b"\x89PNG and so on"


class Contents:
    """Stands in for what reads prompts, and returns the contents of the images."""

    def encode_prompt(self, messages, images, tools, variables, *, longest):
        del messages, tools, variables, longest
        return [content for _, content in images], PromptInputs(torch.zeros(0), torch.zeros(100))


class Handler(BaseHTTPRequestHandler):
    """Serves a picture, and things that are none."""

    def do_GET(self):
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:1/secret")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/nowhere" else 200)
        if self.path == "/cut":
            self.send_header("Content-Length", "1000")
        self.end_headers()
        if self.path == "/slow":
            while not self.server.is_over.wait(0.01):
                self.wfile.write(b"x")
                self.wfile.flush()
        elif self.path == "/large":
            self.wfile.write(bytes(2000))
        else:
            self.wfile.write(PIXELS + self.path.encode())

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def port():
    """Port of a server of images on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.is_over = threading.Event()
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.is_over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def read(urls, hosts=()):
    images = [(f"content[{number}]", url) for number, url in enumerate(urls)]
    contents, _ = ServedImages(Contents(), hosts).encode_prompt([], images, longest=10)
    return contents


def test_data_uris_are_read_without_a_host():
    assert read([f"data:image/png;base64,{base64.b64encode(PIXELS).decode()}"]) == [PIXELS]


def test_images_of_listed_addresses_are_fetched(port):
    urls = [f"http://127.0.0.1:{port}/a.png?size=1", f"http://127.0.0.1:{port}/b.png"]

    assert read(urls, [f"127.0.0.1:{port}"]) == [PIXELS + b"/a.png?size=1", PIXELS + b"/b.png"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/redirect", "answers 302; redirects are not followed"),
        ("/nowhere", "answers 404"),
        ("/large", "more than 1,000 bytes"),
        ("/cut", "did not arrive whole|IncompleteRead"),
        ("/slow", "did not arrive whole|cannot be fetched"),
    ],
)
def test_what_is_no_whole_picture_is_refused(port, monkeypatch, path, reason):
    monkeypatch.setattr(served_images, "_MAX_BYTES", 1000 if path == "/large" else 1 << 24)
    monkeypatch.setattr(served_images, "_SECONDS", 0.2 if path == "/slow" else 60.0)

    with pytest.raises(ValueError, match=rf"content\[0\]: the image http.*({reason})"):
        read([f"http://127.0.0.1:{port}{path}"], [f"127.0.0.1:{port}"])


@pytest.mark.parametrize(
    ("url", "hosts", "reason"),
    [
        ("http://127.0.0.1:{port}/", [], "does not fetch images from"),
        ("http://127.0.0.1:{port}/", ["127.0.0.1"], "does not fetch images from"),  # another port
        ("http://localhost:{port}/", ["localhost:{port}"], "has the private address 127.0.0.1"),
        ("http://2130706433:{port}/", ["127.0.0.1:{port}"], "does not fetch images from"),
        ("http://127.0.0.1:{port}@example.com/", ["127.0.0.1:{port}"], "does not fetch images from"),
        ("ftp://127.0.0.1/", ["127.0.0.1"], "is not a data URI"),
        ("file:///etc/passwd", [""], "is not a data URI"),
        ("http://[::1/", ["[::1"], "is not a URL"),
        ("http://127.0.0.1:99999/", ["127.0.0.1"], "is not a URL"),
        ("", [""], "is not a data URI"),
    ],
)
def test_other_hosts_and_schemes_are_refused(port, monkeypatch, url, hosts, reason):
    at_home = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: at_home)

    with pytest.raises(ValueError, match=reason):
        read([url.format(port=port)], [host.format(port=port) for host in hosts])


def test_prompts_wait_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(served_images, "_MAX_HELD_BYTES", 500)
    images = ServedImages(Contents())

    held = [images.encode_prompt([], [], longest=10) for _ in range(2)]
    with pytest.raises(RequestError, match="too many prompts with images are waiting") as raised:
        images.encode_prompt([], [], longest=10)
    held.clear()

    assert raised.value.status == 429
    images.encode_prompt([], [], longest=10)


def test_too_many_images_are_refused():
    with pytest.raises(ValueError, match=f"{MAX_IMAGES + 1} images; send {MAX_IMAGES} or fewer"):
        read(["data:image/png;base64,"] * (MAX_IMAGES + 1))
