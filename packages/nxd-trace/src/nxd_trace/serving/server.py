"""The server process: its connections, its signals and its end. The only file that uses uvicorn."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nxd_trace.errors import WorkerError, headline
from nxd_trace.serving.app import check_installed, make_app
from nxd_trace.serving.middleware import AllowedSites, Message, Receive, Send
from nxd_trace.serving.service import CompletionService, ServerLimits

if TYPE_CHECKING:
    import uvicorn

_log = logging.getLogger("nxd_trace.serving")

_SECONDS_TO_TAKE_ERRORS = 1.0  # for clients whose requests have been ended
_OTHER_FILES = 128  # beside connections
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def serve(
    service: CompletionService,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allowed: AllowedSites | None = None,
) -> None:
    """Answer requests until a signal comes. Port 0 takes a free one, which the log names.

    At SIGINT or SIGTERM no more requests are taken. Those that run are finished, or ended with an error after the
    limit `shutdown_timeout`; then this returns. A second signal ends the process at once, and its workers with it.

    Args:
        service: the service that answers; it is closed at the end.
        host: address to listen at.
        port: to listen at.
        allowed: names of the server and sites whose pages may call it; by default `host` alone, and none.

    Raises:
        ValueError: starlette or uvicorn is not installed, or there is no such port.
        WorkerError: the workers failed more often than they may be started again.
        SystemExit: the address cannot be listened at, which the log explains.
    """
    check_installed()
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port={port} must be from 0 to {(1 << 16) - 1}")
    allowed = allowed or AllowedSites()
    server = _make_server(service, host, port, replace(allowed, hosts=(*allowed.hosts, host)))
    gc.freeze()  # or each full collection, of all that torch has loaded, would stop the event loop for 0.2 s
    try:
        server.run()
    finally:
        gc.unfreeze()
    if not service.scheduler.has_ended:
        _log.warning("the model is still busy; ending the process without waiting for it")
        os._exit(0)  # which ends the workers
    failure = service.scheduler.failure
    if service.scheduler.has_given_up and failure is not None:
        raise WorkerError(f"the workers failed too often: {headline(failure)}") from failure


def _make_server(service: CompletionService, host: str, port: int, allowed: AllowedSites) -> uvicorn.Server:
    import uvicorn  # noqa: PLC0415 - optional
    from uvicorn.config import LOGGING_CONFIG  # noqa: PLC0415 - optional
    from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: PLC0415 - optional

    connections = Connections(service.limits)
    _allow_files(service.limits.max_connections + _OTHER_FILES)

    class Server(uvicorn.Server):
        should_exit: bool

        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                os._exit(128 + sig)
            self.should_exit = True

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or service.scheduler.has_given_up

        async def shutdown(self, sockets: Any = None) -> None:
            loop, timeout = asyncio.get_running_loop(), service.limits.shutdown_timeout
            loop.call_later(timeout, service.scheduler.end_requests)
            loop.call_later(timeout + _SECONDS_TO_TAKE_ERRORS, connections.abort)
            await super().shutdown(sockets)

    log_config = deepcopy(LOGGING_CONFIG)
    log_config["loggers"]["nxd_trace.serving"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    config = uvicorn.Config(
        connections.mark_busy(make_app(service, allowed)),
        host=host,
        port=port,
        http=lambda **settings: GuardedConnection(H11Protocol(**settings), connections),
        ws="none",
        access_log=False,
        proxy_headers=False,
        log_config=log_config,
    )
    return Server(config)


def _allow_files(number: int) -> None:
    """Raise this process's limit of open files, as far as it may."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or allowed >= number:
        return
    allowed = number if most == resource.RLIM_INFINITY else min(number, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    if allowed < number:
        _log.warning("max_connections needs %d open files, and only %d are allowed; raise ulimit -n", number, allowed)


class Connections:
    """The connections of a server: closes those that stand still, are one too many, or carry pipelined requests.

    A connection is busy while a request of it is answered, and idle otherwise. Clients that send many requests without
    waiting for answers would get most of the server's time; they get one answer.

    Args:
        limits: `max_connections` and `client_timeout`.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.client_timeout = limits.client_timeout
        self._max_connections = limits.max_connections
        self._of_client: dict[Any, GuardedConnection] = {}
        self._idle: dict[GuardedConnection, None] = {}  # those that have been idle for longest come first

    def mark_busy(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """An ASGI application that tells which connections are busy."""

        async def marked(scope: Message, receive: Receive, send: Send) -> None:
            connection = self._of_client.get(scope.get("client"))
            if connection is not None:
                self._idle.pop(connection, None)
                if not connection.take_news():  # the request came with the one before
                    connection.close()
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    return
            try:
                await app(scope, receive, send)
            finally:
                if connection is not None and self._of_client.get(connection.client) is connection:
                    connection.begin_wait()
                    self._idle[connection] = None

        return marked

    def add(self, connection: GuardedConnection) -> bool:
        """Make room for a connection, if need be at the cost of an idle one; false if all are busy."""
        if len(self._of_client) >= self._max_connections:
            if not self._idle:
                return False
            next(iter(self._idle)).abort()
        self._of_client[connection.client] = connection
        self._idle[connection] = None
        return True

    def remove(self, connection: GuardedConnection) -> None:
        """Forget one that is closed."""
        self._of_client.pop(connection.client, None)
        self._idle.pop(connection, None)

    def is_idle(self, connection: GuardedConnection) -> bool:
        """Whether no request of it is answered."""
        return connection in self._idle

    def abort(self) -> None:
        """Close all at once."""
        for connection in list(self._of_client.values()):
            connection.abort()


class GuardedConnection(asyncio.Protocol):
    """One connection: passes what happens to another protocol, and closes it where the client stands still.

    That is where it begins no request, or does not take what it is sent, for `client_timeout`. The application limits
    the time of a request's body.

    Args:
        protocol: protocol class for HTTP.
        connections: open connections of the server.

    Attributes:
        client: address and port of the client.
    """

    def __init__(self, protocol: asyncio.Protocol, connections: Connections) -> None:
        self._protocol = protocol
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._is_clogged = False
        self._has_news = False
        self.client: Any = None

    def connection_made(self, transport: Any) -> None:
        """Take the connection, or refuse it where there are too many."""
        self._transport = transport
        address = transport.get_extra_info("peername")  # None of a client that has gone already
        self.client = address and tuple(address[:2])
        self._is_taken = self.client is not None and self._connections.add(self)
        if self._is_taken:
            self._protocol.connection_made(transport)
            self.begin_wait()
            self._look()
        else:
            transport.write(_FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        self._has_news = True
        if self._is_taken:
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._protocol.eof_received() if self._is_taken else None

    def connection_lost(self, error: Exception | None) -> None:
        """Pass it on."""
        if self._is_taken:
            self._looking.cancel()
            self._connections.remove(self)
            self._protocol.connection_lost(error)

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        self._is_clogged = True
        self.begin_wait()
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """The client takes it again."""
        self._is_clogged = False
        self._protocol.resume_writing()

    def begin_wait(self) -> None:
        """From now on the client has `client_timeout`."""
        self._waits_since = self._loop.time()

    def take_news(self) -> bool:
        """Whether the client has sent anything since this was asked last."""
        news, self._has_news = self._has_news, False
        return news

    def close(self) -> None:
        """Close it once everything has been sent."""
        self._transport.close()

    def abort(self) -> None:
        """Close it at once, whatever has not been sent yet."""
        self._transport.abort()
        self._connections.remove(self)

    def _look(self) -> None:
        """Now and then: close the connection if the client took too long."""
        timeout = self._connections.client_timeout
        if self._loop.time() - self._waits_since >= timeout:
            if self._is_clogged or self._transport.is_closing():
                self.abort()
            elif self._connections.is_idle(self):
                self.close()
        self._looking = self._loop.call_later(timeout / 4, self._look)
