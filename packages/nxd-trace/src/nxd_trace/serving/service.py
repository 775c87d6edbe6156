"""The endpoints without HTTP: from a request's JSON to the chunks of its texts."""

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
from nxd_trace.serving.detokenizer import IncrementalDetokenizer
from nxd_trace.serving.metrics import ServerMetrics
from nxd_trace.serving.prompts import ChatEncoder, ImageEncoder, ServedModel
from nxd_trace.serving.responses import CompletionOutput
from nxd_trace.serving.scheduler import GeneratedToken, RestartPolicy, ScheduledPrompt, Scheduler
from nxd_trace.serving.weight_updates import UpdateSettings, WeightUpdates

T = TypeVar("T")

_THREADS = 4
_THREADS_PER_ADDRESS = 2
_SMALL_BODY_BYTES = 1 << 13  # parsed in about a millisecond, unless the chat template loops

ReadRequest = Callable[[bytes, ServedModel, int], protocol.CompletionRequest]


class TextTokenizer(Protocol):
    """A tokenizer.

    It may have an attribute `prefix`, the ids that a text begins with and that `encode` omits; and a method
    `token_bytes(token) -> bytes`, for tokens that are only part of a character.
    """

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""

    @property
    def end_of_document(self) -> int:
        """The token that ends a text."""

    def encode(self, text: str) -> Sequence[int] | Any:
        """Return the ids of a text, as a list or an array."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ids."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits on requests and connections.

    Attributes:
        max_waiting: maximum number of waiting prompts per client; four times as many for all clients.
        max_prompts: maximum number of texts to generate for one request.
        max_body_bytes: maximum size of a request's body.
        max_connections: maximum number of connections; a new one replaces the one that has been idle longest.
        client_timeout: seconds for a client to begin a request, to send its body, and to receive the response.
        shutdown_timeout: seconds for running requests at shutdown.

    Raises:
        ValueError: a limit is not positive.
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
class Client:
    """The sender of a request.

    Attributes:
        address: network address; the batch is divided evenly among addresses.
        user: credentials of the request, which distinguish the users behind one address, such as a proxy's.
    """

    address: str = ""
    user: str = ""


_ANONYMOUS = Client()


class BodyParser:
    """Parses and tokenizes bodies in threads. Small ones do not wait for large ones, nor clients for each other.

    A chat template may loop for seconds before it is stopped. So only one small and one large body per client, and two
    per address, are parsed at a time; other threads remain free for others.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_THREADS, "nxd-trace-small-bodies")
        self._large = ThreadPoolExecutor(_THREADS, "nxd-trace-large-bodies")
        self._semaphores: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, client: Client, num_bytes: int, parse: Callable[[], T]) -> T:
        """Call `parse` in a thread when it is the client's turn, and return its result."""
        is_small = num_bytes <= _SMALL_BODY_BYTES
        client_turn = self._semaphore((is_small, client.address, client.user), 1)
        address_turn = self._semaphore((is_small, client.address), _THREADS_PER_ADDRESS)
        async with client_turn, address_turn:
            threads = self._small if is_small else self._large
            return await asyncio.get_running_loop().run_in_executor(threads, parse)

    def close(self) -> None:
        """Drop waiting bodies, without waiting for those being parsed."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    def _semaphore(self, owner: Hashable, number: int) -> asyncio.Semaphore:
        return self._semaphores.setdefault(owner, asyncio.Semaphore(number))


class CompletionStream:
    """The texts of one request, while they are generated.

    Attributes:
        formatter: formatter of the response.
    """

    def __init__(self, service: "CompletionService", request: protocol.CompletionRequest, client: Client) -> None:
        self.request = request
        self._service = service
        self._started = time.perf_counter()
        self._events: asyncio.Queue[tuple[int, GeneratedToken | Exception]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        owners = (client.address, client.user, id(self))
        salt = service.cache_salt(client, request)
        self._prompts = [
            ScheduledPrompt(
                prompt,
                request.settings.for_prompt(index * request.best_of + number),
                partial(self._deliver, index * request.best_of + number),
                owners,
                salt,
                request.inputs,
            )
            for index, prompt in enumerate(request.prompts)
            for number in range(request.best_of)
        ]
        decode = service.tokenizer.decode
        self._builders = [_OutputBuilder(index, request, decode) for index in range(len(self._prompts))]
        self._num_prompt_tokens = sum(map(len, request.prompts))
        self._num_generated = 0
        self._num_cached = 0
        self._has_token = False
        make_formatter = responses.ChatFormatter if request.is_chat else responses.CompletionFormatter
        self._common = {
            "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.model,
        }
        self.formatter = make_formatter(
            self._common,
            decode,
            service.token_bytes,
            has_logprobs=request.has_logprobs,
            has_token_ids=request.has_token_ids,
        )
        service.scheduler.submit(self._prompts)
        service.metrics.count_tokens(prompt=self._num_prompt_tokens)

    async def chunks(self) -> AsyncIterator[CompletionOutput]:
        """Yield the texts of all prompts as they are generated; a reader that stops early cancels the rest."""
        unfinished = set(range(len(self._prompts)))
        try:
            while unfinished:
                index, event = await self._events.get()
                if index not in unfinished:  # a token that was generated before a stop string was found
                    continue
                if isinstance(event, RequestError):
                    raise event
                if isinstance(event, Exception):
                    raise RequestError(503, f"the model failed: {headline(event)}") from event
                self._count(event)
                self._common.update(self._service.version_field(self._prompts[index].weights_version))
                chunk = self._builders[index].push(event)
                if chunk.finish_reason is not None:
                    unfinished.discard(index)
                    self._service.scheduler.cancel([self._prompts[index]])
                yield chunk
        finally:  # also if the client has disconnected
            self._service.scheduler.cancel([self._prompts[index] for index in unfinished])

    async def response(self) -> dict[str, Any]:
        """Return the whole response, once everything is generated."""
        outputs = [CompletionOutput(index, "") for index in range(len(self._prompts))]
        async with aclosing(self.chunks()) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                output = outputs[chunk.index]
                output.text += chunk.text
                output.logprobs += chunk.logprobs
                output.token_ids += chunk.token_ids
                output.finish_reason = chunk.finish_reason
        return self.formatter.response(self._best(outputs), self.usage())

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        return responses.usage(self._num_prompt_tokens, self._num_generated, self._num_cached)

    def cancel(self) -> None:
        """Cancel everything that is not finished."""
        self._service.scheduler.cancel(self._prompts)

    def _best(self, outputs: Sequence[CompletionOutput]) -> list[CompletionOutput]:
        """Return the `n` texts of each prompt whose tokens have the highest mean log-probability."""
        best_of, n = self.request.best_of, self.request.n
        best: list[CompletionOutput] = []
        for start in range(0, len(outputs), best_of):
            of_prompt = outputs[start : start + best_of]
            if n < best_of:
                of_prompt = sorted(of_prompt, key=lambda output: -self._builders[output.index].mean_logprob)[:n]
            best += of_prompt
        return [replace(output, index=index) for index, output in enumerate(best)]

    def _count(self, event: GeneratedToken) -> None:
        if not self._has_token:
            self._has_token = True
            self._service.metrics.count_first_token(time.perf_counter() - self._started)
        self._num_cached = max(self._num_cached, event.num_cached)
        if not self.request.scores_only:
            self._num_generated += 1
            self._service.metrics.count_tokens(written=1)

    def _deliver(self, index: int, event: GeneratedToken | Exception) -> None:
        """Queue a token; called in the scheduler's thread."""
        with suppress(RuntimeError):  # the event loop is closed, and all clients with it
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))


class _OutputBuilder:
    """Turns the tokens of one text into chunks."""

    def __init__(self, index: int, request: protocol.CompletionRequest, decode: Callable[[Iterable[int]], str]) -> None:
        self._index = index
        self._scores_only = request.scores_only
        self._end_tokens = request.settings.stop_tokens
        self._detokenizer = IncrementalDetokenizer(decode, request.stop)
        self._prompt_text = request.prompt_texts[index // request.best_of] if request.prompt_texts else ""
        self._length = 0
        self._logprobs: list[float] = []

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens so far."""
        return sum(self._logprobs) / max(1, len(self._logprobs))

    def push(self, event: GeneratedToken) -> CompletionOutput:
        """Return the next chunk; with `echo`, the first one begins with the prompt."""
        chunk = CompletionOutput(self._index, self._prompt_text, offset=self._length)
        self._prompt_text = ""
        chunk.logprobs += event.prompt_logprobs
        reason: str | None = event.finish_reason
        if self._scores_only:
            reason = "length"
        else:
            chunk.token_ids.append(event.token)
            if event.token not in self._end_tokens:
                chunk.text += self._detokenizer.push(event.token)
                chunk.logprobs += [] if event.logprobs is None else [event.logprobs]
            if event.logprobs is not None and event.logprobs.logprob is not None:
                self._logprobs.append(event.logprobs.logprob)
            if reason is not None:
                chunk.text += self._detokenizer.flush()
        chunk.finish_reason = "stop" if self._detokenizer.stopped else reason
        self._length += len(chunk.text)
        return chunk


class CompletionService:
    """One model with its tokenizer and its queue.

    Args:
        engine: the batch.
        tokenizer: tokenizer of the model.
        model: name of the model.
        chat: the chat template; None for a server without chat completions.
        images: reads conversations with images; None for a model of text alone.
        end_tokens: tokens that end a text; by default the tokenizer's.
        limits: limits on requests.
        restarts: limits on restarts of failed workers.
        shared_prefixes: whether different clients share the cache of equal prefixes. This saves time, but reveals to a
            client (by `cached_tokens` and response times) whether another one has sent a given text.
        updates: who may update the weights; None for weights that stay.

    Attributes:
        token_bytes: function that returns the bytes of a token.
        metrics: the server's metrics.
        scheduler: the queue.
        updates: updates of the weights, if they are accepted.

    Raises:
        ValueError: weights of this model cannot be updated, because they are part of its programs.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: TextTokenizer,
        *,
        model: str,
        chat: ChatEncoder | None = None,
        images: ImageEncoder | None = None,
        end_tokens: Sequence[int] = (),
        limits: ServerLimits | None = None,
        restarts: RestartPolicy | None = None,
        shared_prefixes: bool = False,
        updates: UpdateSettings | None = None,
    ) -> None:
        if updates is not None:
            engine.check_replaceable()
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
        self.updates = None if updates is None else WeightUpdates(self.scheduler, updates)
        self._model_card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "nxd",
            "input_modalities": ["text"] if images is None else ["text", "image"],
        }
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
            images=images,
        )
        self._parser = BodyParser()

    @property
    def model_card(self) -> dict[str, Any]:
        """Entry of `/v1/models`."""
        return self._model_card | self.version_field(self.scheduler.weights_version)

    def version_field(self, version: str) -> dict[str, str]:
        """Return the field of responses with the version of the weights; nothing unless updates are accepted."""
        return {} if self.updates is None else {"weights_version": version}

    async def start(
        self, body: bytes, read: ReadRequest = protocol.read_completion, client: Client = _ANONYMOUS
    ) -> CompletionStream:
        """Check a request and queue its prompts; called in the event loop that reads the chunks.

        Raises:
            RequestError: the request is rejected.
        """
        self.scheduler.check_running()  # before any work
        read_body = partial(read, body, self._served, random.getrandbits(32))
        request = await self._parser.run(client, len(body), read_body)
        return CompletionStream(self, request, client)

    def cache_salt(self, client: Client, request: protocol.CompletionRequest) -> bytes:
        """Return the salt of a request's cache; requests with the same salt share equal prefixes."""
        owner = () if self._shared_prefixes else (client.address, client.user)
        return json.dumps([*owner, request.cache_salt]).encode()

    def health(self) -> tuple[bool, dict[str, str]]:
        """Return whether the model runs, and the response: "ok" or its error as status."""
        failure = self.scheduler.failure
        status = "ok" if failure is None else headline(failure)
        return failure is None, {"status": status} | self.version_field(self.scheduler.weights_version)

    def metrics_text(self) -> str:
        """Return all metrics in Prometheus's format."""
        sequences = {"waiting": self.scheduler.num_waiting, "running": self.scheduler.num_running}
        draft_tokens = dict(zip(("proposed", "accepted"), self._engine.num_draft_tokens, strict=True))
        return self.metrics.text(sequences, draft_tokens)

    def close(self) -> None:
        """End the queue's thread; waiting and running requests get an error."""
        self._parser.close()
        self.scheduler.close()
        if self.updates is not None:
            self.updates.close()
