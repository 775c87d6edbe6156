"""The images of requests to `nxd serve`: data URIs, and files of hosts that the server's flags list.

Requests are from strangers. A URL is only fetched from a listed host, at an address that is not private unless the
address itself is listed; redirects are not followed, and size and time are bounded.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import SplitResult, urlsplit

from nxd_data.images import data_uri_bytes, is_data_uri, shortened
from nxd_trace.errors import RequestError
from nxd_trace.generation import PromptInputs

from nxd_trainer.image_prompts import ImagePrompts

MAX_IMAGES = 32  # of a conversation
_MAX_BYTES = 1 << 24  # of a fetched image
_SECONDS = 15.0  # for all fetches of a conversation
_MAX_HELD_BYTES = 1 << 30
_PORTS = {"http": 80, "https": 443}


class ServedImages:
    """Reads conversations with images, as `nxd_trace.serving.CompletionService` wants it.

    Args:
        prompts: reads prompts with images.
        hosts: hosts that images may be fetched from: a name or an address, with `:port` if it is not that of http or
            https; none by default.
    """

    def __init__(self, prompts: ImagePrompts[PromptInputs], hosts: Sequence[str] = ()) -> None:
        self._prompts = prompts
        self._hosts = frozenset(host.lower() for host in hosts)
        self._lock = threading.RLock()  # a prompt may end while this thread has it
        self._held_bytes = 0  # of the features of all prompts that have not ended

    def encode_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[tuple[str, str]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        longest: int,
    ) -> tuple[list[int], PromptInputs]:
        """Return the tokens and features of a conversation; see `nxd_trace.serving.prompts.ImageEncoder`.

        Raises:
            ValueError: an image is refused, or the conversation is.
            LookupError: the chat template does not read a variable.
            RequestError: the features of waiting prompts take too much memory.
        """
        if len(images) > MAX_IMAGES:
            raise ValueError(f"the messages have {len(images)} images; send {MAX_IMAGES} or fewer")
        deadline = time.monotonic() + _SECONDS
        if self._held_bytes > _MAX_HELD_BYTES:
            raise RequestError(429, "too many prompts with images are waiting; try again later", retry_after=1)
        contents = [(place, self._content(place, url, deadline)) for place, url in images]
        tokens, inputs = self._prompts.encode_prompt(messages, contents, tools, variables, longest=longest)
        self._hold(inputs.features.nbytes)
        weakref.finalize(inputs, self._hold, -inputs.features.nbytes)
        return tokens, inputs

    def _hold(self, num_bytes: int) -> None:
        with self._lock:
            self._held_bytes += num_bytes

    def _content(self, place: str, url: str, deadline: float) -> bytes:
        if is_data_uri(url):
            return data_uri_bytes(place, url)
        shown = f"{place}: the image {shortened(url)}"
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme)
        except ValueError as error:
            raise ValueError(f"{shown} is not a URL: {error}") from error
        if parts.scheme not in _PORTS or not parts.hostname or port is None:
            raise ValueError(f"{shown} is not a data URI; send data:image/png;base64,...")
        names = {f"{parts.hostname}:{port}", *([parts.hostname] if port == _PORTS[parts.scheme] else [])}
        if not names & self._hosts:
            raise ValueError(
                f"{shown} is at a host that this server does not fetch images from; send the image as a data URI, or "
                f"start nxd serve with --image-host {parts.hostname}"
            )
        try:
            return _fetched(parts, parts.hostname, port, deadline)
        except (OSError, HTTPException, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
            raise ValueError(f"{shown} cannot be fetched: {reason}") from error


def _fetched(url: SplitResult, host: str, port: int, deadline: float) -> bytes:
    """Return what an HTTP server has at a URL; raises OSError, HTTPException or ValueError."""
    with _connected(host, port, url.scheme, deadline) as connected:
        # Closes a connection that sends too slowly, byte by byte.
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), connected.shutdown, [socket.SHUT_RDWR])
        timer.daemon = True
        timer.start()
        try:
            connection = HTTPConnection(host, port)
            connection.sock = connected
            target = (url.path or "/") + (f"?{url.query}" if url.query else "")
            connection.request("GET", target, headers={"Accept": "image/*", "Connection": "close"})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"the server answers {response.status}; redirects are not followed")
            content = response.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
            if time.monotonic() >= deadline or (response.length or 0) > 0:
                raise ValueError(f"it did not arrive whole within {_SECONDS:g} s")
            return content
        finally:
            timer.cancel()


def _connected(host: str, port: int, scheme: str, deadline: float) -> socket.socket:
    """Connect to a host at an address that is not private, unless the host is an address itself."""
    [(*_, found), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    address = str(found[0])
    if address != host and not ipaddress.ip_address(address.partition("%")[0]).is_global:
        raise ValueError(f"{host} has the private address {address}; list the address with --image-host to allow it")
    plain = socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic()))
    if scheme == "http":
        return plain
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
