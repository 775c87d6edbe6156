"""The server process, in uvicorn: connections, signals and shutdown."""

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

_SECONDS_TO_RECEIVE_ERRORS = 1.0  # after requests were ended
_OTHER_FILES = 128  # open files besides connections
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def serve(
    service: CompletionService,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allowed: AllowedSites | None = None,
) -> None:
    """Answer requests until a signal arrives.

    At SIGINT or SIGTERM the server stops accepting requests. Running ones finish, or end with an error after
    `shutdown_timeout`; then this function returns. A second signal ends the process and its workers at once.

    Args:
        service: the service; it is closed at the end.
        host: address to listen on.
        port: port to listen on; 0 for a free one, which is logged.
        allowed: names of the server, and sites whose pages may call it; by default only `host`, and no sites.

    Raises:
        ValueError: starlette or uvicorn is not installed, or the port is invalid.
        WorkerError: the workers failed more often than `RestartPolicy` allows.
        SystemExit: the address is not available; the reason is logged.
    """
    check_installed()
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port={port} must be from 0 to {(1 << 16) - 1}")
    allowed = allowed or AllowedSites()
    server = _make_server(service, host, port, replace(allowed, hosts=(*allowed.hosts, host)))
    gc.freeze()  # otherwise a full collection of everything that torch has loaded stops the event loop for 0.2 s
    try:
        server.run()
    finally:
        gc.unfreeze()
    if not service.scheduler.has_ended:
        _log.warning("the model is still busy; ending the process without waiting for it")
        os._exit(0)  # this ends the workers, too
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
            loop.call_later(timeout + _SECONDS_TO_RECEIVE_ERRORS, connections.abort)
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
    """Raise this process's limit of open files, as far as allowed."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or allowed >= number:
        return
    allowed = number if most == resource.RLIM_INFINITY else min(number, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    if allowed < number:
        _log.warning("max_connections needs %d open files, and only %d are allowed; raise ulimit -n", number, allowed)


class Connections:
    """The open connections: closes those that time out, exceed the maximum, or carry pipelined requests.

    A connection is busy while a request is answered, and idle otherwise. A client that sends requests without waiting
    for responses would get most of the server's time, so it gets just one response.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.client_timeout = limits.client_timeout
        self._max_connections = limits.max_connections
        self._of_client: dict[Any, GuardedConnection] = {}
        self._idle: dict[GuardedConnection, None] = {}  # an ordered set: the one that has been idle longest comes first

    def mark_busy(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """Wrap an ASGI application to record which connections are busy."""

        async def marked(scope: Message, receive: Receive, send: Send) -> None:
            connection = self._of_client.get(scope.get("client"))
            if connection is not None:
                self._idle.pop(connection, None)
                if not connection.take_data_flag():  # the request was pipelined
                    connection.close()
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    return
            try:
                await app(scope, receive, send)
            finally:
                if connection is not None and self._of_client.get(connection.client) is connection:
                    connection.start_timeout()
                    self._idle[connection] = None

        return marked

    def add(self, connection: GuardedConnection) -> bool:
        """Add a connection, in place of an idle one if there are too many; returns False if all are busy."""
        if len(self._of_client) >= self._max_connections:
            if not self._idle:
                return False
            next(iter(self._idle)).abort()
        self._of_client[connection.client] = connection
        self._idle[connection] = None
        return True

    def remove(self, connection: GuardedConnection) -> None:
        """Remove a closed connection."""
        self._of_client.pop(connection.client, None)
        self._idle.pop(connection, None)

    def is_idle(self, connection: GuardedConnection) -> bool:
        """Whether the connection has no running request."""
        return connection in self._idle

    def abort(self) -> None:
        """Close all connections immediately."""
        for connection in list(self._of_client.values()):
            connection.abort()


class GuardedConnection(asyncio.Protocol):
    """One connection: forwards events to the HTTP protocol, and closes the connection if the client times out.

    A client times out if it neither begins a request nor receives the response for `client_timeout`. The application
    limits the time for a request's body.

    Attributes:
        client: address and port of the client.
    """

    def __init__(self, protocol: asyncio.Protocol, connections: Connections) -> None:
        self._protocol = protocol
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._is_paused = False
        self._has_data = False
        self.client: Any = None

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, or reject it if there are too many."""
        self._transport = transport
        address = transport.get_extra_info("peername")  # None if the client has disconnected already
        self.client = address and tuple(address[:2])
        self._is_accepted = self.client is not None and self._connections.add(self)
        if self._is_accepted:
            self._protocol.connection_made(transport)
            self.start_timeout()
            self._check_timeout()
        else:
            transport.write(_FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Forward data."""
        self._has_data = True
        if self._is_accepted:
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Forward the end of data."""
        return self._protocol.eof_received() if self._is_accepted else None

    def connection_lost(self, error: Exception | None) -> None:
        """Forward the loss of the connection."""
        if self._is_accepted:
            self._next_check.cancel()
            self._connections.remove(self)
            self._protocol.connection_lost(error)

    def pause_writing(self) -> None:
        """Forward that the client does not receive fast enough."""
        self._is_paused = True
        self.start_timeout()
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Forward that the client receives again."""
        self._is_paused = False
        self._protocol.resume_writing()

    def start_timeout(self) -> None:
        """Start the client's timeout."""
        self._timeout_start = self._loop.time()

    def take_data_flag(self) -> bool:
        """Return whether the client has sent anything since the last call."""
        had_data, self._has_data = self._has_data, False
        return had_data

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately."""
        self._transport.abort()
        self._connections.remove(self)

    def _check_timeout(self) -> None:
        """Close the connection if the client timed out; called periodically."""
        timeout = self._connections.client_timeout
        if self._loop.time() - self._timeout_start >= timeout:
            if self._is_paused or self._transport.is_closing():
                self.abort()
            elif self._connections.is_idle(self):
                self.close()
        self._next_check = self._loop.call_later(timeout / 4, self._check_timeout)
