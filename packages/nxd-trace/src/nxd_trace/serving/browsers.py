"""Protects a server from web pages of other sites that a user of the server has open in a browser.

A page of another site reaches a server on loopback, or in a private network, through the user's browser: by a host name
of its own that it lets point to the server (DNS rebinding), or by a form or a plain-text post, for which a browser does
not ask the server first. Whoever is no browser sends no Origin, and names the server it means in Host.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any
from urllib.parse import urlsplit

from nxd_trace.serving.errors import RequestError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@\s]+)(?::\d{1,5})?")


@dataclass(frozen=True)
class AllowedSites:
    """Who may talk to the server.

    Attributes:
        hosts: names by which clients reach it, beside IP addresses, localhost and this machine's own name; "*" for any.
        origins: sites whose pages may call it, such as `https://chat.example`, beside its own page; "*" for any.

    Raises:
        ValueError: an origin that is not `scheme://host` or `scheme://host:port`, or a host that is no name.
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
        """Whether a page of this origin may call the server, which it reached by this Host header."""
        return "*" in self.origins or origin in self.origins or urlsplit(origin).netloc == host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class BrowserGuard:
    """ASGI middleware: refuses what a page of another site has a browser send.

    Status 421 for a Host that is not this server's, 403 for an Origin of another site, 415 for a post that is not
    declared as JSON, which is the only kind that browsers send to another site without asking it.

    Args:
        app: the application.
        allowed: hosts and origins.
    """

    def __init__(self, app: Application, allowed: AllowedSites) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(refusal.body).encode()})

    def _refusal(self, scope: Message) -> RequestError | None:
        hosts = _values(scope, b"host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self._allowed.has_host(host):
            return RequestError(
                421,
                f"Host {short_repr(host)} is not a name of this server; allow it by --allowed-host, or ask "
                "by the address",
                code="unknown_host",
            )
        for origin in _values(scope, b"origin"):
            if not self._allowed.has_origin(origin, host):
                return RequestError(
                    403,
                    f"pages of {short_repr(origin)} may not call this server; allow them by --allowed-origin",
                    code="unknown_origin",
                )
        kinds = [kind.partition(";")[0].strip().lower() for kind in _values(scope, b"content-type")]
        if scope["method"] == "POST" and kinds != ["application/json"]:
            return RequestError(
                415, f"Content-Type is {short_repr(', '.join(kinds))}; send JSON as 'Content-Type: application/json'"
            )
        return None


def _values(scope: Message, name: bytes) -> list[str]:
    found: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
    return [value.decode("latin-1") for key, value in found if key == name]
