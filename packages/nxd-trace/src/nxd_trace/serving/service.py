"""The endpoints without HTTP: from a request's JSON to the pieces of its completions."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from nxd_trace.errors import RequestError, headline
from nxd_trace.generation import GenerationEngine
from nxd_trace.serving import protocol, responses
from nxd_trace.serving.metrics import ServerMetrics
from nxd_trace.serving.prompts import ChatEncoder, ServedModel
from nxd_trace.serving.scheduler import Job, RestartPolicy, Scheduler, WrittenToken
from nxd_trace.serving.text import TextStream

T = TypeVar("T")


_THREADS = 4


_THREADS_OF_ADDRESS = 2


# Reading a body of this size takes a millisecond or so, unless its chat template loops.
_SMALL_BODY_BYTES = 1 << 13


@dataclass(frozen=True)
class Client:
    """Who sent a request.

    Attributes:
        address: network address; the batch is divided evenly among addresses.
        user: credentials that were sent along, which tell apart the users of one address, such as a proxy's.
    """

    address: str = ""
    user: str = ""


ANYBODY = Client()


class BodyReaders:
    """Reads bodies outside the event loop. Small ones do not wait for large ones, nor a client for another's.

    A chat template may loop until it is ended, after seconds. So one body of a client is read at a time, of either
    size, and two of an address; the other threads are left to others.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_THREADS, "nxd-trace-small-bodies")
        self._large = ThreadPoolExecutor(_THREADS, "nxd-trace-large-bodies")
        self._turns: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, client: Client, num_bytes: int, read: Callable[[], T]) -> T:
        """What reading gives, in a thread, when it is the client's turn.

        Args:
            client: client that sends the body.
            num_bytes: number of bytes of the body.
            read: called once.
        """
        is_small = num_bytes <= _SMALL_BODY_BYTES
        of_client = self._turns_of((is_small, client.address, client.user), 1)
        of_address = self._turns_of((is_small, client.address), _THREADS_OF_ADDRESS)
        async with of_client, of_address:
            threads = self._small if is_small else self._large
            return await asyncio.get_running_loop().run_in_executor(threads, read)

    def close(self) -> None:
        """Drop what waits; what is being read is not waited for."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    def _turns_of(self, owner: Hashable, number: int) -> asyncio.Semaphore:
        return self._turns.setdefault(owner, asyncio.Semaphore(number))


class TextTokenizer(Protocol):
    """Converts between texts and token ids.

    It may have an attribute `prefix`, the ids that a text begins with, which `encode` omits.
    A method `token_bytes(token) -> bytes` is used if there is one: a character may take several tokens, which have no
    text of their own.
    """

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
        max_waiting: prompts of one client that wait for a row of the batch; of all clients, four times as many.
        max_prompts: in one request.
        max_body_bytes: maximum size of one request.
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


class Completions:
    """The texts of one request, while they are written.

    Args:
        service: the service that generates them.
        request: the client's request.
        client: who asks.

    Attributes:
        form: makes the answers.
        stream: whether the client wants each piece as it comes.
        include_usage: whether it wants a stream to end by the counts of tokens.

    Raises:
        RequestError: the queue is full, or the model does not run.
    """

    def __init__(self, service: "CompletionService", request: protocol.CompletionRequest, client: Client) -> None:
        self._service = service
        self._request = request
        self._begun = time.perf_counter()
        self._events: asyncio.Queue[tuple[int, WrittenToken | Exception]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        tried = request.num_tried
        owners = (client.address, client.user, id(self))
        salt = service.cache_salt(client, request)
        self._jobs = [
            Job(
                prompt,
                settings.of_prompt(index * tried + number),
                partial(self._deliver, index * tried + number),
                owners,
                salt,
            )
            for index, (prompt, settings) in enumerate(zip(request.prompts, request.settings, strict=True))
            for number in range(tried)
        ]
        self._writers = [_TextWriter(index, self) for index in range(len(self._jobs))]
        self._written_tokens = 0
        self._cached_tokens = 0
        self._has_token = False
        make_form = responses.ChatForm if request.is_chat else responses.CompletionForm
        common = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model,
        }
        self.form = make_form(common, service.tokenizer.decode, service.token_bytes, has_logprobs=request.has_logprobs)
        self.stream = request.stream
        self.include_usage = request.include_usage
        service.scheduler.submit(self._jobs)
        service.metrics.count_tokens(prompt=self._prompt_tokens)

    async def pieces(self) -> AsyncIterator[responses.Text]:
        """The text of all prompts, as it comes; a reader that stops early drops the rest.

        Raises:
            RequestError: the model failed, or the server is closing.
        """
        unfinished = set(range(len(self._jobs)))
        try:
            while unfinished:
                index, event = await self._events.get()
                if index not in unfinished:  # a token that was in flight when a stop text was found
                    continue
                if isinstance(event, RequestError):
                    raise event
                if isinstance(event, Exception):
                    raise RequestError(503, f"the model failed: {headline(event)}") from event
                self._count(event)
                piece = self._writers[index].push(event)
                if piece.finish_reason is not None:
                    unfinished.discard(index)
                    self._service.scheduler.cancel([self._jobs[index]])
                yield piece
        finally:  # also when the client has gone
            self._service.scheduler.cancel([self._jobs[index] for index in unfinished])

    async def whole(self) -> dict[str, Any]:
        """The answer, when all is written.

        Raises:
            RequestError: as `pieces`.
        """
        texts = [responses.Text(index, "") for index in range(len(self._jobs))]
        async with aclosing(self.pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                text = texts[piece.index]
                text.text += piece.text
                text.logprobs += piece.logprobs
                text.finish_reason = piece.finish_reason
        return self.form.whole(self._best(texts), self.usage())

    def usage(self) -> dict[str, Any]:
        """Tokens taken and given so far."""
        return responses.usage(self._prompt_tokens, self._written_tokens, self._cached_tokens)

    def cancel(self) -> None:
        """Drop what is not done."""
        self._service.scheduler.cancel(self._jobs)

    def _best(self, texts: Sequence[responses.Text]) -> list[responses.Text]:
        """Of each prompt as many texts as were asked for: those whose tokens are likeliest in the mean."""
        tried, number = self._request.num_tried, self._request.num_texts
        best: list[responses.Text] = []
        for start in range(0, len(texts), tried):
            of_prompt = sorted(texts[start : start + tried], key=lambda text: -self._writers[text.index].mean_logprob)
            best += of_prompt[:number] if number < tried else texts[start : start + tried]
        return [replace(text, index=index) for index, text in enumerate(best)]

    @property
    def _prompt_tokens(self) -> int:
        return sum(map(len, self._request.prompts))

    def _count(self, event: WrittenToken) -> None:
        if not self._has_token:
            self._has_token = True
            self._service.metrics.count_first_token(time.perf_counter() - self._begun)
        self._cached_tokens = max(self._cached_tokens, event.num_shared)
        if not self._request.writes_nothing:
            self._written_tokens += 1
            self._service.metrics.count_tokens(written=1)

    def _deliver(self, index: int, event: WrittenToken | Exception) -> None:
        """Called in the scheduler's thread."""
        with suppress(RuntimeError):  # of an event loop that has been closed, with all its clients
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    @property
    def request(self) -> protocol.CompletionRequest:
        """What was asked for."""
        return self._request

    @property
    def tokenizer(self) -> TextTokenizer:
        """Of the model."""
        return self._service.tokenizer


class _TextWriter:
    """Makes pieces of text of the tokens of one of a request's texts."""

    def __init__(self, index: int, completions: Completions) -> None:
        request = completions.request
        self._index = index
        self._request = request
        self._end_tokens = request.settings[0].stop_tokens
        self._stream = TextStream(completions.tokenizer.decode, request.stop)
        self._prompt_text = request.prompt_texts[index // request.num_tried] if request.prompt_texts else ""
        self._length = 0
        self._logprobs: list[float] = []

    @property
    def mean_logprob(self) -> float:
        """Of the tokens written so far."""
        return sum(self._logprobs) / max(1, len(self._logprobs))

    def push(self, event: WrittenToken) -> responses.Text:
        """The next piece; the first one begins with the prompt, if it is to be echoed."""
        piece = responses.Text(self._index, self._prompt_text, offset=self._length)
        self._prompt_text = ""
        piece.logprobs += event.prompt_logprobs
        reason: str | None = event.finish_reason
        if self._request.writes_nothing:
            reason = "length"
        else:
            if event.token not in self._end_tokens:
                piece.text += self._stream.push(event.token)
                piece.logprobs += [] if event.logprobs is None else [event.logprobs]
            if event.logprobs is not None and event.logprobs.logprob is not None:
                self._logprobs.append(event.logprobs.logprob)
            if reason is not None:
                piece.text += self._stream.rest()
        piece.finish_reason = "stop" if self._stream.stopped else reason
        self._length += len(piece.text)
        return piece


ReadRequest = Callable[[bytes, ServedModel, int], protocol.CompletionRequest]


class CompletionService:
    """One model, its tokenizer and its queue.

    Args:
        engine: the batch.
        tokenizer: tokenizer of the model.
        model: its name.
        chat: the template of its conversations; without one there are no chat completions.
        end_tokens: each ends a text; the tokenizer's alone if empty.
        limits: limits on requests.
        restarts: limit on restarts of failed workers.
        shared_prefixes: whether prompts of different clients that begin alike share their cache. It saves time, and
            tells a client (by `cached_tokens`, and by the time it takes) whether another one has sent a given text.

    Attributes:
        model: its name.
        limits: limits on requests.
        tokenizer: tokenizer of the model.
        token_bytes: the bytes of a token.
        metrics: counts.
        scheduler: the queue.
        model_card: entry of `/v1/models`.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: TextTokenizer,
        *,
        model: str,
        chat: ChatEncoder | None = None,
        end_tokens: Sequence[int] = (),
        limits: ServerLimits | None = None,
        restarts: RestartPolicy | None = None,
        shared_prefixes: bool = False,
    ) -> None:
        self.model = model
        self.limits = limits or ServerLimits()
        self.metrics = ServerMetrics()
        self._engine = engine
        self.scheduler = Scheduler(engine, self.limits.max_waiting, restarts)
        self.tokenizer = tokenizer
        self.token_bytes: responses.TokenBytes = getattr(
            tokenizer, "token_bytes", lambda token: tokenizer.decode([token]).encode(errors="replace")
        )
        self._shared_prefixes = shared_prefixes
        self.model_card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "nxd"}
        self._served = ServedModel(
            name=model,
            encode=tokenizer.encode,
            prefix=list(getattr(tokenizer, "prefix", ())),
            decode=tokenizer.decode,
            chat=chat,
            vocab_size=tokenizer.vocab_size,
            end_tokens=tuple(end_tokens) or (tokenizer.end_of_document,),
            max_length=engine.max_length,
            max_prompts=self.limits.max_prompts,
        )
        self._readers = BodyReaders()

    async def start(
        self, body: bytes, read: ReadRequest = protocol.read_completion, client: Client = ANYBODY
    ) -> Completions:
        """Check a request and queue its prompts; called in the event loop that will read the pieces.

        Raises:
            RequestError: it is refused.
        """
        self.scheduler.check_runs()  # before any work
        read_body = partial(read, body, self._served, random.getrandbits(32))
        request = await self._readers.read(client, len(body), read_body)
        return Completions(self, request, client)

    def cache_salt(self, client: Client, request: protocol.CompletionRequest) -> bytes:
        """Requests with the same salt share the cache of prompts that begin alike."""
        owner = () if self._shared_prefixes else (client.address, client.user)
        return json.dumps([*owner, request.cache_salt]).encode()

    def health(self) -> tuple[bool, str]:
        """Whether the model runs, and what is wrong if it does not."""
        failure = self.scheduler.failure
        return failure is None, "ok" if failure is None else headline(failure)

    def metrics_text(self) -> str:
        """All counts, as Prometheus reads them."""
        sequences = {"waiting": self.scheduler.num_waiting, "running": self.scheduler.num_running}
        return self.metrics.text(sequences, dict(zip(("proposed", "accepted"), self._engine.num_guesses, strict=True)))

    def close(self) -> None:
        """End the queue's thread; what waits or runs is ended with an error."""
        self._readers.close()
        self.scheduler.close()
