"""The endpoints without HTTP: from a request's JSON to the pieces of its completions."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from nxd_trace.generation import GenerationEngine
from nxd_trace.serving import protocol
from nxd_trace.serving.errors import RequestError
from nxd_trace.serving.metrics import ServerMetrics
from nxd_trace.serving.scheduler import Job, Scheduler, WrittenToken
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
    """The limits beyond which requests are refused.

    Attributes:
        max_waiting: prompts that wait for a row of the batch.
        max_prompts: in one request.
        max_body_bytes: of one request.
    """

    max_waiting: int = 64
    max_prompts: int = 16
    max_body_bytes: int = 1 << 20


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
        RequestError: the prompts do not fit the model or the queue.
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
            RequestError: the model failed.
        """
        unfinished = set(range(len(self._jobs)))
        try:
            while unfinished:
                index, event = await self._events.get()
                if isinstance(event, Exception):
                    raise RequestError(503, f"the model failed: {event}") from event
                if index not in unfinished:  # a token that was under way when a stop text was found
                    continue
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
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _piece(self, index: int, event: WrittenToken) -> Piece:
        stream = self._streams[index]
        is_end = event.token == self._service.tokenizer.end_of_document
        text = "" if is_end else stream.push(event.token)
        if stream.stopped:
            return Piece(index, text, "stop")
        if event.finish_reason is not None:
            return Piece(index, text + stream.rest(), event.finish_reason)
        return Piece(index, text, None)


class CompletionService:
    """One model, its tokenizer and its queue.

    Args:
        engine: the batch.
        tokenizer: of the model.
        model: its name.
        limits: what is refused.

    Attributes:
        model: its name.
        limits: what is refused.
        tokenizer: of the model.
        metrics: counts.
        scheduler: the queue.
    """

    def __init__(
        self, engine: GenerationEngine, tokenizer: TextTokenizer, *, model: str, limits: ServerLimits | None = None
    ) -> None:
        self.model = model
        self.limits = limits or ServerLimits()
        self.metrics = ServerMetrics()
        self.scheduler = Scheduler(engine, self.limits.max_waiting)
        self.tokenizer = tokenizer

    def start(self, body: Any) -> Completions:
        """Check a request and queue its prompts; called in the event loop that will read the pieces.

        Raises:
            RequestError: it is refused.
        """
        request = protocol.read_request(
            body,
            model=self.model,
            encode=self.tokenizer.encode,
            vocab_size=self.tokenizer.vocab_size,
            end_token=self.tokenizer.end_of_document,
            max_prompts=self.limits.max_prompts,
            random_seed=random.getrandbits(32),
        )
        return Completions(self, request)

    def health(self) -> tuple[bool, str]:
        """Whether the model runs, and what is wrong if it does not."""
        failure = self.scheduler.failure
        return failure is None, "ok" if failure is None else str(failure)

    def metrics_text(self) -> str:
        """All counts, as Prometheus reads them."""
        return self.metrics.text({"waiting": self.scheduler.num_waiting, "running": self.scheduler.num_running})

    def close(self) -> None:
        """End the queue's thread."""
        self.scheduler.close()
