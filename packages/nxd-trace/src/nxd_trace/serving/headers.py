"""Refuses requests by their headers alone: too many of them, or a body whose end they tell in two ways."""

import json

from nxd_trace.serving.browsers import Application, Message, Receive, Send
from nxd_trace.serving.errors import RequestError

MAX_HEADER_BYTES = 1 << 14


class HeaderGuard:
    """ASGI middleware: status 431 for headers beyond 16 KiB, 400 for both Content-Length and Transfer-Encoding.

    A proxy before the server may take the other of the two for the end of a body, and what follows for the request of
    another client.

    Args:
        app: the application.
    """

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        refusal = _refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(refusal.body).encode()})


def _refusal(scope: Message) -> RequestError | None:
    headers = scope.get("headers", ())
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        return RequestError(431, f"the request has more than {MAX_HEADER_BYTES} bytes of headers; send fewer")
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        return RequestError(400, "the request has both Content-Length and Transfer-Encoding; send one of them")
    return None
