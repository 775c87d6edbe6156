"""ASGI middleware that rejects requests by their headers, before anything reads their body.

A web page of another site can reach a server on loopback or in a private network through a user's browser: under a host
name of its own that resolves to the server (DNS rebinding), or by a form or plain-text post, for which a browser sends
no preflight request. Clients other than browsers send no Origin, and name the intended server in Host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any
from urllib.parse import urlsplit

from nxd_trace.errors import RequestError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

WEIGHTS_PATH = "/update_weights"  # its bodies are safetensors files, not JSON

_MAX_HEADER_BYTES = 1 << 14
_MAX_SECONDS_TO_DRAIN = 1.0
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@\s]+)(?::\d{1,5})?")


@dataclass(frozen=True)
class AllowedSites:
    """The hosts that the server answers as, and the sites whose pages may call it.

    Attributes:
        hosts: host names of the server, besides IP addresses, localhost and this machine's own name; "*" for any.
        origins: sites whose pages may call it, such as `https://chat.example`, besides its own page; "*" for any.

    Raises:
        ValueError: an origin is not `scheme://host` or `scheme://host:port`, or a host is not a host name.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for host in self.hosts:
            if host != "*" and not _is_address(host) and (_HOST.fullmatch(host) is None or ":" in host):
                raise ValueError(f"allowed host {host!r} is not a host name; write it without scheme and port")
        for origin in self.origins:
            parts = urlsplit(origin)
            if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}".lower()):
                raise ValueError(f"allowed origin {origin!r} is not scheme://host[:port] in lower case, or *")

    def has_host(self, header: str) -> bool:
        """Whether a Host header names this server."""
        found = _HOST.fullmatch(header)
        if found is None:
            return False
        name = found[1].lower().rstrip(".")
        known = {"localhost", socket.gethostname().lower(), *map(str.lower, self.hosts)}
        return "*" in known or name in known or name.endswith(".localhost") or _is_address(name)

    def has_origin(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may call the server, given the request's Host header."""
        return "*" in self.origins or origin in self.origins or urlsplit(origin).netloc == host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class RequestGuard:
    """Rejects requests with invalid headers, and requests from pages of other sites."""

    def __init__(self, app: Application, allowed: AllowedSites) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        error, headers = None, [(b"content-type", b"application/json")]
        if scope["type"] == "http":
            error = _check_headers(scope)
            headers += [] if error is None else [(b"connection", b"close")]
            error = error or self._check_site(scope)
        if error is None:
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(error.body).encode()})

    def _check_site(self, scope: Message) -> RequestError | None:
        """Check the Host and the Origin, and that a post is JSON: the only type that needs a preflight request."""
        hosts = _values(scope, b"host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self._allowed.has_host(host):
            return RequestError(
                421,
                f"Host {short_repr(host)} is not a name of this server; allow it with --allowed-host, or use the "
                "server's IP address",
                code="unknown_host",
            )
        for origin in _values(scope, b"origin"):
            if not self._allowed.has_origin(origin, host):
                return RequestError(
                    403,
                    f"pages of {short_repr(origin)} may not call this server; allow them with --allowed-origin",
                    code="unknown_origin",
                )
        kinds = [kind.partition(";")[0].strip().lower() for kind in _values(scope, b"content-type")]
        what, kind = ("JSON", "application/json")
        if scope["path"] == WEIGHTS_PATH:
            what, kind = ("safetensors", "application/octet-stream")
        if scope["method"] == "POST" and kinds != [kind]:
            return RequestError(
                415, f"Content-Type is {short_repr(', '.join(kinds))}; send {what} as 'Content-Type: {kind}'"
            )
        return None


def _values(scope: Message, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope.get("headers", ()) if key == name]


def _check_headers(scope: Message) -> RequestError | None:
    """Check the size of the headers, and that they define the end of the body once.

    A proxy in front of the server may use the other definition, and treat the rest as another client's request.
    """
    headers = scope.get("headers", ())
    if sum(len(name) + len(value) for name, value in headers) > _MAX_HEADER_BYTES:
        return RequestError(431, f"the request has more than {_MAX_HEADER_BYTES} bytes of headers; send fewer")
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        return RequestError(400, "the request has both Content-Length and Transfer-Encoding; send one of them")
    return None


class CloseAfterUnreadBody:
    """Closes the connection after the response if the request's body has not been read to its end.

    The response is sent at once. Then the rest of the body is discarded, for a second and up to a number of bytes:
    closing a connection with unread data may lose the response.
    """

    def __init__(self, app: Application, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        names = {name for name, _ in scope.get("headers", ())}
        is_unread = scope["type"] == "http" and not names.isdisjoint({b"content-length", b"transfer-encoding"})

        async def receive_part() -> Message:
            nonlocal is_unread
            message = await receive()
            is_unread = is_unread and message.get("more_body", False)
            return message

        async def send_part(message: Message) -> None:
            if is_unread and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            if is_unread and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await drain()
                message = {"type": "http.response.body"}
            await send(message)

        async def drain() -> None:
            remaining = self._max_bytes
            with suppress(TimeoutError):
                async with asyncio.timeout(_MAX_SECONDS_TO_DRAIN):
                    while is_unread and remaining > 0:
                        remaining -= len((await receive_part()).get("body", b""))

        await self._app(scope, receive_part, send_part)
