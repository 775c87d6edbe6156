"""The scheduler: a thread that steps the batch, the queue of prompts, and restarts of failed workers."""

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Self

from nxd_trace.errors import RequestError, WorkerError, headline
from nxd_trace.generation import GenerationEngine, PromptInputs, RunningSequence, SamplingSettings, TokenLogprobs
from nxd_trace.generation.sequence import FinishReason
from nxd_trace.weights import WeightSource

_log = logging.getLogger("nxd_trace.serving")

_SECONDS_BETWEEN_CHECKS = 1.0  # of idle workers
_SECONDS_TO_CLOSE = 2.0
_FULL_QUEUES = 4  # number of clients that can fill their share of the queue


@dataclass(frozen=True)
class GeneratedToken:
    """One generated token of one prompt.

    Attributes:
        token: token id.
        finish_reason: None if more tokens follow.
        logprobs: log-probabilities of the token, if requested.
        prompt_logprobs: log-probabilities of the prompt's tokens, with the first token, if requested.
        num_cached: number of prompt tokens found in the cache.
    """

    token: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached: int = 0

    @classmethod
    def of_latest_step(cls, sequence: RunningSequence) -> list[Self]:
        """Return the tokens that the latest step generated."""
        length = len(sequence.tokens)
        return [
            cls(
                sequence.tokens[index],
                sequence.finish_reason if index == length - 1 else None,
                sequence.logprobs[index] if sequence.logprobs else None,
                tuple(sequence.prompt_logprobs) if index == 0 else (),
                sequence.num_cached,
            )
            for index in range(length - sequence.num_new, length)
        ]


Deliver = Callable[[GeneratedToken | Exception], None]


@dataclass(eq=False)
class ScheduledPrompt:
    """One prompt that is waiting or running.

    Attributes:
        prompt: token ids.
        settings: sampling settings.
        deliver: function called in the scheduler's thread with each token, or with the error that ends the prompt.
        owners: levels among which the batch is divided evenly: the client's address, its user, the request.
        cache_salt: prompts with different salts share no blocks of the cache.
        inputs: the prompt's inputs beside its token ids, if any.
        sequence: its sequence in the batch; None while it waits.
        request: all prompts of its request.
        weights_version: version of the weights that continue it, the same for all prompts of a request.
    """

    prompt: Sequence[int]
    settings: SamplingSettings
    deliver: Deliver
    owners: tuple[Hashable, ...] = ()
    cache_salt: bytes = b""
    inputs: PromptInputs | None = None
    sequence: RunningSequence | None = None
    request: Sequence["ScheduledPrompt"] = ()
    weights_version: str = ""

    @property
    def has_begun(self) -> bool:
        """Whether a prompt of its request has joined the batch."""
        return any(prompt.sequence is not None for prompt in self.request)

    @property
    def client(self) -> Hashable:
        """The outermost owner, whose share of the queue is limited."""
        return self.owners[:1]


@dataclass(frozen=True)
class RestartPolicy:
    """Limits on restarts of a model's failed workers.

    Attributes:
        max_restarts: maximum number of restarts within `window`; after one more failure, the scheduler gives up.
        window: length of the window in seconds.
        first_delay: seconds before the first restart in the window; each further restart waits twice as long.
        longest_delay: maximum delay in seconds.

    Raises:
        ValueError: a value is negative.
    """

    max_restarts: int = 5
    window: float = 600.0
    first_delay: float = 1.0
    longest_delay: float = 30.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not value >= 0:
                raise ValueError(f"{limit.name}={value} must be 0 or more")


@dataclass(frozen=True)
class _WeightUpdate:
    weights: WeightSource
    version: str
    done: Future[str] = field(default_factory=Future)


class Scheduler:
    """Runs prompts as rows of the batch become free, divided evenly among clients.

    A free row goes to the client with the fewest rows, then to its user with the fewest, then to the user's request
    with the fewest, and among equals to the prompt that came first.

    When the model fails, for example because a worker died, all waiting and running prompts get the error, and new
    workers are started from the same saved model. Both are logged.

    Args:
        engine: the batch; only this scheduler's thread steps it from now on.
        max_waiting: maximum number of waiting prompts per client; four times as many for all clients.
        restarts: limits on restarts of workers.

    Attributes:
        failure: the model's error, until it runs again; None while it works.
        has_given_up: whether the thread has ended because the model failed too often.
        weights_version: version of the model's weights.
    """

    def __init__(self, engine: GenerationEngine, max_waiting: int = 64, restarts: RestartPolicy | None = None) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._restarts = restarts or RestartPolicy()
        self._failure_times: list[float] = []  # within the window
        self._retry_after = 1
        self._waiting: list[ScheduledPrompt] = []
        self._running: dict[RunningSequence, ScheduledPrompt] = {}
        self._cancelled: list[ScheduledPrompt] = []
        self._update: _WeightUpdate | None = None  # to be made once no request is running
        self._num_updates = 0
        self.weights_version = "0"
        self._changed = threading.Condition()
        self._closing = False
        self.failure: Exception | None = None
        self.has_given_up = False
        self._thread = threading.Thread(target=self._run, name="nxd-trace-scheduler", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of prompts without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of prompts in the batch."""
        return len(self._running)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, so that nothing uses the engine."""
        return not self._thread.is_alive()

    def check_running(self) -> None:
        """Check that prompts are accepted."""
        if self._closing:
            raise _closing_error()
        if self.failure is not None:
            raise RequestError(
                503,
                f"the model is not running: {headline(self.failure)}; try again later",
                retry_after=self._retry_after,
            )

    def submit(self, prompts: Sequence[ScheduledPrompt]) -> None:
        """Queue the checked prompts of a request: all of them or none.

        Raises:
            RequestError: the queue is full (429), or the model is not running (503).
        """
        with self._changed:
            self.check_running()
            # Prompts that get a free row at the next step do not count as waiting.
            free = self._engine.batch_size - len(self._running)
            own = sum(it.client == prompts[0].client for it in self._waiting)
            for limit, waiting in (
                (self._max_waiting, own),
                (_FULL_QUEUES * self._max_waiting, len(self._waiting)),
            ):
                if waiting + len(prompts) > limit + free:
                    raise RequestError(429, f"the queue is full ({limit} prompts wait); try again later", retry_after=1)
            for prompt in prompts:
                prompt.request = prompts
            self._waiting.extend(prompts)
            self._changed.notify()

    def cancel(self, prompts: Sequence[ScheduledPrompt]) -> None:
        """Drop prompts whose client no longer waits; finished prompts are ignored."""
        with self._changed:
            self._waiting = [it for it in self._waiting if it not in prompts]
            self._cancelled.extend(prompts)
            self._changed.notify()

    def replace_weights(self, weights: WeightSource, version: str | None = None) -> Future[str]:
        """Replace the model's weights between requests: those that have begun finish before, all others begin after.

        Args:
            weights: the new weights; they must be readable until the result is there.
            version: the new version; by default the number of updates.

        Returns:
            The future version. Its exception is a `RequestError` if the old weights stay: 400 if the new ones do not
            match, 503 if a worker failed; then new workers start, with the old weights.

        Raises:
            RequestError: the model is not running (503).
        """
        with self._changed:
            self.check_running()
            assert self._update is None
            self._update = _WeightUpdate(weights, version or str(self._num_updates + 1))
            self._changed.notify()
            return self._update.done

    def end_requests(self) -> None:
        """Reject new prompts, and deliver an error to all others at once, even during a long step."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._fail(_closing_error())

    def close(self) -> None:
        """End all requests, then the thread after its current step.

        If that step, or a restart of workers, takes seconds, the thread is left to end with the process.
        """
        self.end_requests()
        self._thread.join(_SECONDS_TO_CLOSE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while self._admit():
            try:
                self._step()
            except Exception as error:
                if not self._restart(error):
                    return
        with contextlib.suppress(WorkerError):
            self._engine.clear()  # the engine can be used again

    def _step(self) -> None:
        if not self._running:
            self._engine.check_workers()
            self._make_update()
            return
        try:
            extended = self._engine.step()
        except FloatingPointError as error:  # perhaps only with these prompts
            self._engine.clear()
            self._fail_running(error)
        else:
            self._deliver(extended)

    def _make_update(self) -> None:
        with self._changed:
            update, self._update = self._update, None
        if update is None or not update.done.set_running_or_notify_cancel():
            return
        try:
            self._engine.replace_weights(update.weights)
        except ValueError as error:  # before any worker was asked
            update.done.set_exception(self._not_updated(error, 400))
        except Exception as error:
            update.done.set_exception(self._not_updated(error))
            raise  # the workers may have different weights, so they are restarted
        else:
            self._num_updates += 1
            self.weights_version = update.version
            _log.info("the weights have been replaced by version %r", update.version)
            update.done.set_result(update.version)

    def _not_updated(self, error: Exception, status: int = 503) -> RequestError:
        what = str(error) if isinstance(error, ValueError | RequestError) else f"the model failed: {headline(error)}"
        return RequestError(status, f"{what}; the weights are still of version {self.weights_version!r}")

    def _admit(self) -> bool:
        """Wait for something to do, and add waiting prompts to the batch; returns False once the scheduler closes."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._waiting or self._running or self._update,
                timeout=_SECONDS_BETWEEN_CHECKS,
            )
            for cancelled in self._cancelled:
                if cancelled.sequence is not None and self._running.pop(cancelled.sequence, None) is not None:
                    self._engine.remove(cancelled.sequence)
            self._cancelled.clear()
            while self._engine.num_free and (prompt := self._next_prompt()) is not None:
                prompt.weights_version = self.weights_version
                try:
                    prompt.sequence = self._engine.add(prompt.prompt, prompt.settings, prompt.cache_salt, prompt.inputs)
                except (TypeError, ValueError) as error:  # the prompt was not checked
                    prompt.deliver(error)
                else:
                    self._running[prompt.sequence] = prompt
            return not self._closing

    def _next_prompt(self) -> ScheduledPrompt | None:
        """Remove and return the waiting prompt whose owners have the fewest rows; before an update, a begun one."""
        allowed = [prompt for prompt in self._waiting if self._update is None or prompt.has_begun]
        if not allowed:
            return None
        rows = Counter(owner for prompt in self._running.values() for owner in _with_parents(prompt.owners))
        fewest = min(allowed, key=lambda prompt: [rows[owner] for owner in _with_parents(prompt.owners)])
        self._waiting.remove(fewest)
        return fewest

    def _deliver(self, extended: Sequence[RunningSequence]) -> None:
        for sequence in extended:
            with self._changed:
                is_last = sequence.finish_reason is not None or sequence.failure is not None
                prompt = self._running.pop(sequence, None) if is_last else self._running.get(sequence)
            if prompt is not None:  # otherwise its request has ended
                for token in GeneratedToken.of_latest_step(sequence):
                    prompt.deliver(token)
                if sequence.failure is not None:
                    prompt.deliver(sequence.failure)

    def _restart(self, error: Exception) -> bool:
        """Start new workers, as often as the policy allows; returns False if the scheduler gives up or closes."""
        while True:
            delay = self._next_delay()
            with self._changed:
                self.failure = error
                self._retry_after = max(1, math.ceil(delay))
            self._fail(error)
            number, limit = len(self._failure_times), self._restarts.max_restarts
            if number > limit:
                _log.error("%s; giving up after %d restarts in %g s", headline(error), limit, self._restarts.window)
                self.has_given_up = True
                return False
            _log.error("%s; starting new workers in %g s (restart %d of %d)", headline(error), delay, number, limit)
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, delay):
                    return False
            try:
                self._engine.restart()
            except Exception as another:
                error = another
                continue
            with self._changed:
                self.failure = None
            _log.info("the new workers are running; requests are answered again")
            return True

    def _next_delay(self) -> float:
        """Record a failure, and return the seconds before the next restart."""
        now = time.monotonic()
        self._failure_times = [at for at in self._failure_times if now - at < self._restarts.window] + [now]
        delay = self._restarts.first_delay * 2.0 ** min(len(self._failure_times) - 1, 60)
        return min(delay, self._restarts.longest_delay)

    def _fail(self, error: Exception) -> None:
        """End all waiting and running prompts with an error."""
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
            update, self._update = self._update, None
        self._fail_running(error)
        if update is not None and update.done.set_running_or_notify_cancel():
            update.done.set_exception(self._not_updated(error))
        for prompt in waiting:
            prompt.deliver(error)

    def _fail_running(self, error: Exception) -> None:
        with self._changed:
            running = list(self._running.values())
            self._running.clear()
        for prompt in running:
            prompt.deliver(error)


def _with_parents(owners: tuple[Hashable, ...]) -> list[tuple[Hashable, ...]]:
    """Return each owner with its parents, so that equal names under different parents differ."""
    return [owners[: number + 1] for number in range(len(owners))]


def _closing_error() -> RequestError:
    return RequestError(503, "the server is closing; try again later", retry_after=1)
