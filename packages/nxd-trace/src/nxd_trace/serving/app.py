"""The HTTP server: the only file that uses starlette and uvicorn. `service` implements the endpoints."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nxd_trace.serving import protocol
from nxd_trace.serving.errors import RequestError
from nxd_trace.serving.service import Completions, CompletionService

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


def check_installed() -> None:
    """Raise ValueError if starlette or uvicorn is missing, with what to install."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ValueError(f"serving needs {' and '.join(missing)}: pip install 'nxd-trace[serve]'")


def make_app(service: CompletionService) -> Starlette:
    """An ASGI application: `POST /v1/completions`, `GET /v1/models`, `GET /health`, `GET /metrics`.

    Its shutdown ends the service.

    Raises:
        ValueError: starlette or uvicorn is not installed.
    """
    check_installed()
    from starlette.applications import Starlette  # noqa: PLC0415 - optional
    from starlette.routing import Route  # noqa: PLC0415 - optional

    endpoints = _Endpoints(service)
    routes = [
        Route("/v1/completions", endpoints.counted(endpoints.completions), methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()

    return Starlette(routes=routes, lifespan=lifespan)


def serve(service: CompletionService, *, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Answer requests until a signal comes. Port 0 takes a free one, which the log names.

    Returns after SIGINT.

    Raises:
        ValueError: starlette or uvicorn is not installed.
        SystemExit: after SIGTERM, with 143; so `with` blocks around this end the model's workers.
    """
    check_installed()
    import uvicorn  # noqa: PLC0415 - optional

    with _exit_at_termination():
        uvicorn.run(make_app(service), host=host, port=port, access_log=False)


@contextmanager
def _exit_at_termination() -> Iterator[None]:
    """Once uvicorn has shut down it raises the signal again, whose default is to end the process on the spot."""
    if threading.current_thread() is not threading.main_thread():  # where uvicorn leaves signals alone
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Endpoints:
    def __init__(self, service: CompletionService) -> None:
        self._service = service

    def counted(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that answers refusals as JSON. The time of a stream counts until it begins."""

        async def answer(request: Request) -> Response:
            start = time.perf_counter()
            status = 500  # unless it is answered
            try:
                response = await endpoint(request)
                status = response.status_code
            except RequestError as error:
                response = _json(error.body, error.status)
                status = error.status
            finally:
                self._service.metrics.count_request(status, time.perf_counter() - start)
            return response

        return answer

    async def completions(self, request: Request) -> Response:
        completions = self._service.start(await self._body(request))
        if completions.stream:
            return self._stream(completions)
        try:
            return await _while_connected(request, self._whole(completions))
        finally:
            completions.cancel()  # nothing has been read yet if the client was gone at once

    async def _whole(self, completions: Completions) -> Response:
        """One answer, when all is written."""
        texts: dict[int, str] = {}
        reasons: dict[int, str | None] = {}
        async with aclosing(completions.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                texts[piece.index] = texts.get(piece.index, "") + piece.text
                reasons[piece.index] = piece.finish_reason
        choices = [protocol.choice(index, texts[index], reasons[index]) for index in sorted(texts)]
        usage = protocol.usage(completions.prompt_tokens, completions.written_tokens)
        return _json(
            protocol.completion_body(completions.request_id, completions.created, self._service.model, choices, usage)
        )

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [{"id": self._service.model, "object": "model", "owned_by": "nxd"}]})

    async def health(self, _: Request) -> Response:
        healthy, status = self._service.health()
        return _json({"status": status}, 200 if healthy else 503)

    async def metrics(self, _: Request) -> Response:
        from starlette.responses import PlainTextResponse  # noqa: PLC0415 - optional

        return PlainTextResponse(self._service.metrics_text(), media_type="text/plain; version=0.0.4")

    async def _body(self, request: Request) -> Any:
        from starlette.requests import ClientDisconnect  # noqa: PLC0415 - optional

        limit = self._service.limits.max_body_bytes
        data = b""
        try:
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit:
                    raise RequestError(413, f"the request has more than {limit} bytes; send a shorter one")
        except ClientDisconnect as error:
            raise _CLIENT_HAS_GONE from error
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not JSON: {error}") from error

    def _stream(self, completions: Completions) -> Response:
        """Server-sent events: one per piece, then `[DONE]`."""
        from starlette.responses import StreamingResponse  # noqa: PLC0415 - optional

        async def events() -> AsyncIterator[str]:
            async with aclosing(completions.pieces()) as pieces:  # type: ignore[type-var]
                try:
                    async for piece in pieces:
                        if piece.text or piece.finish_reason:
                            made = protocol.choice(piece.index, piece.text, piece.finish_reason)
                            yield _event(
                                protocol.completion_body(
                                    completions.request_id, completions.created, self._service.model, [made], None
                                )
                            )
                except RequestError as error:
                    yield _event(error.body)
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


# As nginx counts them; the client does not get the answer.
_CLIENT_HAS_GONE = RequestError(499, "the client has closed the connection")


async def _while_connected(request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
    """The answer, unless the client leaves before; then what makes it is cancelled.

    Raises:
        RequestError: the client has left.
    """

    async def departure() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.ensure_future(answering), asyncio.ensure_future(departure())
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise _CLIENT_HAS_GONE
        return answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _json(body: dict[str, Any], status: int = 200) -> Response:
    from starlette.responses import Response  # noqa: PLC0415 - optional

    # Not JSONResponse, which fails at half a pair of surrogates; json.dumps writes it as it may have come.
    return Response(json.dumps(body), status, media_type="application/json")
