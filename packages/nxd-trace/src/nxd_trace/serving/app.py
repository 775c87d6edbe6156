"""The endpoints as an ASGI application, in starlette. `service` implements them without HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any

from nxd_trace.errors import RequestError, headline
from nxd_trace.serving import protocol
from nxd_trace.serving.middleware import WEIGHTS_PATH, AllowedSites, CloseAfterUnreadBody, RequestGuard
from nxd_trace.serving.service import Client, CompletionService, CompletionStream, ReadRequest
from nxd_trace.serving.weight_updates import WeightUpdates

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
_PAGE = Path(__file__).with_name("page.html")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
)
_LARGE_BODY_BYTES = 1 << 16
_MAX_LARGE_BODIES = 64  # received or parsed at a time; fewer if they may be very large:
_MAX_BYTES_OF_BODIES = 1 << 28


def check_installed() -> None:
    """Raise ValueError if starlette or uvicorn is not installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ValueError(f"serving needs {' and '.join(missing)}: pip install 'nxd-trace[serve]'")


def make_app(service: CompletionService, allowed: AllowedSites | None = None) -> Starlette:
    """Return the ASGI application of a service; its shutdown closes the service.

    It answers `POST /v1/chat/completions` and `/v1/completions`, `GET /v1/models`, `/v1/models/{id}`, `/health` and
    `/metrics`, and has a page at `/` for talking to the model. If the service accepts updates of the weights, it also
    answers `POST /start_weight_update`, `/update_weights`, `/finish_weight_update` and `/abort_weight_update`.

    Args:
        service: the service.
        allowed: allowed hosts and origins; by default only the server's own.

    Raises:
        ValueError: starlette or uvicorn is not installed.
    """
    check_installed()
    from starlette.applications import Starlette  # noqa: PLC0415 - optional
    from starlette.middleware import Middleware  # noqa: PLC0415 - optional
    from starlette.middleware.cors import CORSMiddleware  # noqa: PLC0415 - optional
    from starlette.routing import Route  # noqa: PLC0415 - optional

    endpoints = _Endpoints(service)
    routes = [
        Route("/v1/chat/completions", endpoints.counted(endpoints.chat_completions), methods=["POST"]),
        Route("/v1/completions", endpoints.counted(endpoints.completions), methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.counted(endpoints.one_model)),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
        Route("/", endpoints.page),
    ]
    if service.updates is not None:
        weights = _WeightEndpoints(service.updates, endpoints)
        routes += [
            Route(path, endpoints.counted(endpoint), methods=["POST"])
            for path, endpoint in (
                ("/start_weight_update", weights.start),
                (WEIGHTS_PATH, weights.receive),
                ("/finish_weight_update", weights.finish),
                ("/abort_weight_update", weights.abort),
            )
        ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()

    allowed = allowed or AllowedSites()
    middleware = [
        Middleware(CloseAfterUnreadBody, max_bytes=service.limits.max_body_bytes),
        Middleware(RequestGuard, allowed=allowed),
        Middleware(CORSMiddleware, allow_origins=allowed.origins, allow_methods=["GET", "POST"], allow_headers=["*"]),
    ]
    errors = {404: _no_such_route, 405: _no_such_method, 500: _internal_error}
    return Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=errors)


class _Endpoints:
    def __init__(self, service: CompletionService) -> None:
        self._service = service
        self._num_large_bodies = 0

    def counted(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint with errors as JSON, counted in the metrics. A stream's time counts until it begins."""

        async def answer(request: Request) -> Response:
            start = time.perf_counter()
            status = 500  # unless the endpoint returns
            try:
                response = await endpoint(request)
                status = response.status_code
            except RequestError as error:
                response = _json(error.body, error.status, error.headers)
                status = error.status
            finally:
                self._service.metrics.count_request(status, time.perf_counter() - start)
            return response

        return answer

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, protocol.read_completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, protocol.read_chat)

    async def _answer(self, request: Request, read: ReadRequest) -> Response:
        data = bytearray()
        try:
            await self.receive(request, data)
            stream = await self._service.start(bytes(data), read, _client_of(request))
        finally:
            self._num_large_bodies -= len(data) > _LARGE_BODY_BYTES
        if stream.request.stream:
            return _events(stream)
        try:
            return await _while_connected(request, stream.response())
        finally:
            stream.cancel()  # needed if the client disconnected before anything was read

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._service.model_card]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._service.model:
            raise RequestError(
                404,
                f"there is no model {short_repr(name)}; this server has {self._service.model!r}",
                "model",
                code="model_not_found",
            )
        return _json(self._service.model_card)

    async def page(self, _: Request) -> Response:
        from starlette.responses import HTMLResponse  # noqa: PLC0415 - optional

        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def health(self, _: Request) -> Response:
        healthy, body = self._service.health()
        return _json(body, 200 if healthy else 503)

    async def metrics(self, _: Request) -> Response:
        from starlette.responses import PlainTextResponse  # noqa: PLC0415 - optional

        return PlainTextResponse(self._service.metrics_text(), media_type="text/plain; version=0.0.4")

    async def receive(self, request: Request, data: bytearray) -> None:
        """Receive the body into `data`, within the limits of size and time."""
        announced = request.headers.get("content-length", "")
        self._check_size(int(announced) if announced.isdecimal() else 0)
        async with self.in_time(), asyncio.timeout(self._service.limits.client_timeout):
            async for chunk in request.stream():
                self._num_large_bodies += len(data) <= _LARGE_BODY_BYTES < len(data) + len(chunk)
                data += chunk
                self._check_size(len(data))

    async def chunks(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the parts of a body of any size, each within the limit of time."""
        parts = request.stream()
        async with self.in_time():
            while True:
                async with asyncio.timeout(self._service.limits.client_timeout):
                    part = await anext(parts, None)
                if part is None:
                    return
                yield part

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Turn the error of a client that disconnects or is too slow into a response."""
        from starlette.requests import ClientDisconnect  # noqa: PLC0415 - optional

        try:
            yield
        except ClientDisconnect as error:
            raise _CLIENT_DISCONNECTED from error
        except TimeoutError as error:
            limit = self._service.limits.client_timeout
            raise RequestError(408, f"the request was not received within {limit:g} s; send it faster") from error

    def _check_size(self, num_bytes: int) -> None:
        limit = self._service.limits.max_body_bytes
        if num_bytes > limit:
            raise RequestError(413, f"the request has more than {limit} bytes; send a shorter one")
        most = min(_MAX_LARGE_BODIES, max(2, _MAX_BYTES_OF_BODIES // limit))
        if num_bytes > _LARGE_BODY_BYTES and self._num_large_bodies > most:
            raise RequestError(429, "too many long requests are being received; try again later", retry_after=1)


class _WeightEndpoints:
    """The phases of an update, for senders that have the token."""

    def __init__(self, updates: WeightUpdates, endpoints: _Endpoints) -> None:
        self._updates = updates
        self._endpoints = endpoints

    async def start(self, request: Request) -> Response:
        body = await self._body(request, "version")
        return _json({"update_id": self._updates.start(body.get("version"))})

    async def receive(self, request: Request) -> Response:
        self._updates.check_sender(request.headers.get("authorization", ""))
        async with aclosing(self._endpoints.chunks(request)) as chunks:  # type: ignore[type-var]
            names = await self._updates.receive(request.query_params.get("update_id"), chunks)
        return _json({"names": names})

    async def finish(self, request: Request) -> Response:
        body = await self._body(request, "update_id")
        return _json({"weights_version": await self._updates.finish(body.get("update_id"))})

    async def abort(self, request: Request) -> Response:
        body = await self._body(request, "update_id")
        self._updates.abort(body.get("update_id"))
        return _json({})

    async def _body(self, request: Request, field: str) -> dict[str, Any]:
        """Check the token, and return the body: an object with at most this field."""
        self._updates.check_sender(request.headers.get("authorization", ""))
        data = bytearray()
        await self._endpoints.receive(request, data)
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict) or body.keys() - {field}:
            raise RequestError(400, f"the body is {short_repr(body)}; send an object with the field {field!r}")
        return body


def _client_of(request: Request) -> Client:
    return Client(request.client.host if request.client else "", request.headers.get("authorization", ""))


def _events(stream: CompletionStream) -> Response:
    """Return server-sent events: one per chunk, then `[DONE]`."""
    from starlette.responses import StreamingResponse  # noqa: PLC0415 - optional

    formatter = stream.formatter
    # With include_usage, every event has usage, but only the last one knows it.
    no_usage = {"usage": None} if stream.request.include_usage else {}

    async def events() -> AsyncIterator[str]:
        started: set[int] = set()
        async with aclosing(stream.chunks()) as chunks:  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    first = None if chunk.index in started else formatter.first_event(chunk.index)
                    started.add(chunk.index)
                    if first is not None:
                        yield _event(first | no_usage)
                    if chunk.text or chunk.logprobs or chunk.finish_reason or stream.request.has_token_ids:
                        yield _event(formatter.event(chunk) | no_usage)
                if stream.request.include_usage:
                    yield _event(formatter.usage_event(stream.usage()))
            except RequestError as error:
                yield _event(error.body)
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _no_such_route(request: Request, _: Exception) -> Response:
    error = RequestError(
        404, f"unknown path {short_repr(request.url.path)}; use one of {', '.join(_ROUTES)}", code="unknown_url"
    )
    return _json(error.body, error.status)


async def _no_such_method(request: Request, raised: Exception) -> Response:
    error = RequestError(
        405, f"{short_repr(request.url.path)} does not accept {request.method}", code="method_not_allowed"
    )
    return _json(error.body, error.status, getattr(raised, "headers", None))


async def _internal_error(request: Request, error: Exception) -> Response:
    del request
    return _json(RequestError(500, f"the server failed: {headline(error)}").body, 500)


# nginx's status for this; the client does not receive it.
_CLIENT_DISCONNECTED = RequestError(499, "the client has closed the connection")


async def _while_connected(request: Request, answering: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """Return the response; if the client disconnects first, cancel it."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.ensure_future(answering), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise _CLIENT_DISCONNECTED
        return _json(answer.result())
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import Response  # noqa: PLC0415 - optional

    # JSONResponse fails on a lone surrogate, which a request may contain; json.dumps escapes it.
    return Response(json.dumps(body), status, headers, media_type="application/json")
