"""The endpoints without HTTP: from a request's JSON to the pieces of its completions."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

from nxd_trace.generation import GenerationEngine
from nxd_trace.serving import protocol
from nxd_trace.serving.errors import RequestError, headline
from nxd_trace.serving.metrics import ServerMetrics
from nxd_trace.serving.scheduler import Job, RestartPolicy, Scheduler, WrittenToken
from nxd_trace.serving.text import TextStream


class TextTokenizer(Protocol):
    """Converts between texts and token ids."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_document(self) -> int:
        """The id that ends a text."""

    def encode(self, text: str) -> Sequence[int] | Any:
        """The ids of a text: a list, or an array."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ids."""


@dataclass(frozen=True)
class ServerLimits:
    """The limits beyond which requests are refused, and connections closed.

    Attributes:
        max_waiting: prompts that wait for a row of the batch.
        max_prompts: in one request.
        max_body_bytes: of one request.
        max_connections: at a time. Beyond it a new one takes the place of the one that has been idle for longest.
        client_timeout: seconds that a client may take to begin a request, to send its body, and to take what it is
            sent.
        shutdown_timeout: seconds for running requests, once the server has been told to end.

    Raises:
        ValueError: a limit that is not positive.
    """

    max_waiting: int = 64
    max_prompts: int = 16
    max_body_bytes: int = 1 << 20
    max_connections: int = 1024
    client_timeout: float = 30.0
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name}={value} must be more than 0")


@dataclass(frozen=True)
class Piece:
    """The next text of one of a request's completions.

    Attributes:
        index: of the prompt.
        text: may be empty.
        finish_reason: None if more will follow.
    """

    index: int
    text: str
    finish_reason: str | None


class Completions:
    """The completions of one request, while they are written.

    Args:
        service: that writes them.
        request: what was asked for.

    Attributes:
        request_id: unique.
        created: when, in seconds since 1970.
        stream: whether the client wants each piece as it comes.
        prompt_tokens: of all prompts.
        written_tokens: so far.

    Raises:
        RequestError: the queue is full, or the model does not run.
    """

    def __init__(self, service: "CompletionService", request: protocol.CompletionRequest) -> None:
        self._service = service
        self._streams = [TextStream(service.tokenizer.decode, request.stop) for _ in request.prompts]
        self._events: asyncio.Queue[tuple[int, WrittenToken | Exception]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._jobs = [
            Job(prompt, request.settings.of_prompt(index), partial(self._deliver, index))
            for index, prompt in enumerate(request.prompts)
        ]
        self.request_id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.stream = request.stream
        self.prompt_tokens = sum(map(len, request.prompts))
        self.written_tokens = 0
        service.scheduler.submit(self._jobs)
        service.metrics.count_tokens(prompt=self.prompt_tokens)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The generated text of all prompts, as it comes; a reader that stops early drops the rest.

        Raises:
            RequestError: the model failed, or the server is closing.
        """
        unfinished = set(range(len(self._jobs)))
        try:
            while unfinished:
                index, event = await self._events.get()
                if index not in unfinished:  # a token that was under way when a stop text was found
                    continue
                if isinstance(event, RequestError):
                    raise event
                if isinstance(event, Exception):
                    raise RequestError(503, f"the model failed: {headline(event)}") from event
                self.written_tokens += 1
                self._service.metrics.count_tokens(written=1)
                piece = self._piece(index, event)
                if piece.finish_reason is not None:
                    unfinished.discard(index)
                    self._service.scheduler.cancel([self._jobs[index]])
                yield piece
        finally:  # also when the client has gone
            self._service.scheduler.cancel([self._jobs[index] for index in unfinished])

    def cancel(self) -> None:
        """Drop what is not done."""
        self._service.scheduler.cancel(self._jobs)

    def _deliver(self, index: int, event: WrittenToken | Exception) -> None:
        """Called in the scheduler's thread."""
        with suppress(RuntimeError):  # of an event loop that has been closed, with all its clients
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _piece(self, index: int, event: WrittenToken) -> Piece:
        stream = self._streams[index]
        is_end = event.token == self._service.tokenizer.end_of_document
        text = "" if is_end else stream.push(event.token)
        if event.finish_reason is not None:
            text += stream.rest()
        return Piece(index, text, "stop" if stream.stopped else event.finish_reason)


# Reading a body of this size takes a millisecond or so.
_SMALL_BODY_BYTES = 1 << 13


class CompletionService:
    """One model, its tokenizer and its queue.

    Args:
        engine: the batch.
        tokenizer: of the model.
        model: its name.
        limits: what is refused.
        restarts: how often workers that failed are started again.

    Attributes:
        model: its name.
        limits: what is refused.
        tokenizer: of the model.
        metrics: counts.
        scheduler: the queue.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: TextTokenizer,
        *,
        model: str,
        limits: ServerLimits | None = None,
        restarts: RestartPolicy | None = None,
    ) -> None:
        self.model = model
        self.limits = limits or ServerLimits()
        self.metrics = ServerMetrics()
        self.scheduler = Scheduler(engine, self.limits.max_waiting, restarts)
        self.tokenizer = tokenizer
        self._served = protocol.ServedModel(
            name=model,
            encode=tokenizer.encode,
            vocab_size=tokenizer.vocab_size,
            end_token=tokenizer.end_of_document,
            max_length=engine.max_length,
            max_prompts=self.limits.max_prompts,
        )
        # Bodies are parsed and tokenized outside the event loop; small ones do not wait for large ones.
        self._small_bodies = ThreadPoolExecutor(1, "nxd-trace-small-bodies")
        self._large_bodies = ThreadPoolExecutor(1, "nxd-trace-large-bodies")

    async def start(self, body: bytes) -> Completions:
        """Check a request and queue its prompts; called in the event loop that will read the pieces.

        Raises:
            RequestError: it is refused.
        """
        self.scheduler.check_runs()  # before any work
        readers = self._small_bodies if len(body) <= _SMALL_BODY_BYTES else self._large_bodies
        request = await asyncio.get_running_loop().run_in_executor(readers, self._read, body)
        return Completions(self, request)

    def _read(self, body: bytes) -> protocol.CompletionRequest:
        request = protocol.read_request(body, self._served, random.getrandbits(32))
        self.scheduler.check(request.prompts, request.settings)
        return request

    def health(self) -> tuple[bool, str]:
        """Whether the model runs, and what is wrong if it does not."""
        failure = self.scheduler.failure
        return failure is None, "ok" if failure is None else headline(failure)

    def metrics_text(self) -> str:
        """All counts, as Prometheus reads them."""
        return self.metrics.text({"waiting": self.scheduler.num_waiting, "running": self.scheduler.num_running})

    def close(self) -> None:
        """End the queue's thread; what waits or runs is ended with an error."""
        for readers in (self._small_bodies, self._large_bodies):
            readers.shutdown(wait=False, cancel_futures=True)
        self.scheduler.close()
