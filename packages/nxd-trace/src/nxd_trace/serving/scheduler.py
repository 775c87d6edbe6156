"""A thread that steps the batch, its queue of prompts, and the restart of workers that have died."""

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Self

from nxd_trace.errors import RequestError, WorkerError, headline
from nxd_trace.generation import GenerationEngine, RunningSequence, SamplingSettings, TokenLogprobs
from nxd_trace.generation.sequence import FinishReason

_log = logging.getLogger("nxd_trace.serving")

_SECONDS_BETWEEN_LOOKS = 1.0  # between checks of idle workers
_SECONDS_TO_CLOSE = 2.0
_FULL_QUEUES = 4  # number of clients that may fill their part of the queue


@dataclass(frozen=True)
class WrittenToken:
    """One token of one prompt.

    Attributes:
        token: token id.
        finish_reason: None if more will follow.
        logprobs: log-probabilities of the token, if requested.
        prompt_logprobs: log-probabilities of the prompt's tokens, with the first token, if requested.
        num_shared: number of prompt tokens found in the cache.
    """

    token: int
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_shared: int = 0

    @classmethod
    def new_of(cls, sequence: RunningSequence) -> list[Self]:
        """The tokens that the latest step wrote."""
        length = len(sequence.tokens)
        return [
            cls(
                sequence.tokens[index],
                sequence.finish_reason if index == length - 1 else None,
                sequence.logprobs[index] if sequence.logprobs else None,
                tuple(sequence.prompt_logprobs) if index == 0 else (),
                sequence.num_shared,
            )
            for index in range(length - sequence.num_new, length)
        ]


Deliver = Callable[[WrittenToken | Exception], None]


@dataclass(eq=False)
class Job:
    """One prompt that waits or runs.

    Attributes:
        prompt: token ids.
        settings: sampling settings.
        deliver: called in the scheduler's thread with each token, or with the error that ends the job.
        owners: levels among which the batch is divided evenly: the client's address, then its user, then the request.
        cache_salt: jobs with different salts share no cache.
        sequence: the row of the batch; None while the prompt waits.
    """

    prompt: Sequence[int]
    settings: SamplingSettings
    deliver: Deliver
    owners: tuple[Hashable, ...] = ()
    cache_salt: bytes = b""
    sequence: RunningSequence | None = None

    @property
    def client(self) -> Hashable:
        """The outermost owner, whose part of the queue is limited."""
        return self.owners[:1]


@dataclass(frozen=True)
class RestartPolicy:
    """Limits on restarts of a model's failed workers.

    Attributes:
        max_restarts: maximum number within `window`; one more failure ends the scheduler.
        window: length of the window in seconds.
        first_delay: seconds before the first restart in the window; each further restart waits twice as long.
        longest_delay: maximum delay in seconds.

    Raises:
        ValueError: a negative value.
    """

    max_restarts: int = 5
    window: float = 600.0
    first_delay: float = 1.0
    longest_delay: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ValueError(f"{field.name}={value} must be 0 or more")


class Scheduler:
    """Runs prompts as rows of the batch become free, divided evenly among clients.

    A free row goes to the client with the fewest rows, then to its user with the fewest, then to the user's request
    with the fewest, and among equals to the prompt that came first.

    When the model fails, for example because a worker died, all waiting and running jobs get the error, and new workers
    are started from the same saved model. Both are logged.

    Args:
        engine: the batch; from now on only this scheduler's thread steps it.
        max_waiting: prompts of one client that may wait for a row, and four times as many of all; more are refused.
        restarts: limit on restarts of workers.

    Attributes:
        failure: error of the model until it runs again; None while it works.
        has_given_up: whether the thread has ended because the model failed too often.
    """

    def __init__(self, engine: GenerationEngine, max_waiting: int = 64, restarts: RestartPolicy | None = None) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._restarts = restarts or RestartPolicy()
        self._failure_times: list[float] = []  # within the window
        self._retry_after = 1
        self._waiting: list[Job] = []
        self._running: dict[RunningSequence, Job] = {}
        self._cancelled: list[Job] = []
        self._changed = threading.Condition()
        self._closing = False
        self.failure: Exception | None = None
        self.has_given_up = False
        self._thread = threading.Thread(target=self._run, name="nxd-trace-scheduler", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Prompts without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts in the batch."""
        return len(self._running)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, so that the engine is no longer used."""
        return not self._thread.is_alive()

    def check_runs(self) -> None:
        """Check that prompts would be taken.

        Raises:
            RequestError: the model has failed, or is being closed (503).
        """
        if self._closing:
            raise _closing()
        if self.failure is not None:
            raise RequestError(
                503,
                f"the model is not running: {headline(self.failure)}; try again later",
                retry_after=self._retry_after,
            )

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the prompts of a request, which have been checked: all of them, or none.

        Raises:
            RequestError: the queue is full (429), or the model does not run (503).
        """
        with self._changed:
            self.check_runs()
            # Prompts that will find a free row at the next step do not count as waiting.
            free = self._engine.batch_size - len(self._running)
            own = sum(job.client == jobs[0].client for job in self._waiting)
            for most, waiting in (
                (self._max_waiting, own),
                (_FULL_QUEUES * self._max_waiting, len(self._waiting)),
            ):
                if waiting + len(jobs) > most + free:
                    raise RequestError(429, f"the queue is full ({most} prompts wait); try again later", retry_after=1)
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Drop prompts whose client no longer waits; finished ones are not changed."""
        with self._changed:
            self._waiting = [job for job in self._waiting if job not in jobs]
            self._cancelled.extend(jobs)
            self._changed.notify()

    def end_requests(self) -> None:
        """Refuse new prompts; what waits or runs is delivered an error at once, even while a step takes long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._fail(_closing())

    def close(self) -> None:
        """End the thread after the step that it is in, after `end_requests`.

        Where that step, or the start of new workers, takes seconds, the thread is left to end with the process.
        """
        self.end_requests()
        self._thread.join(_SECONDS_TO_CLOSE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while self._admit():
            try:
                self._step()
            except Exception as error:
                if not self._restart(error):
                    return
        with contextlib.suppress(WorkerError):
            self._engine.clear()  # for who uses it next

    def _step(self) -> None:
        if not self._running:
            self._engine.check_workers()
            return
        try:
            extended = self._engine.step()
        except FloatingPointError as error:  # of these prompts, maybe; others may fare better
            self._engine.clear()
            self._fail_running(error)
        else:
            self._deliver(extended)

    def _admit(self) -> bool:
        """Wait for something to do, and give waiting prompts their rows; false if it is time to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._waiting or self._running, timeout=_SECONDS_BETWEEN_LOOKS
            )
            for job in self._cancelled:
                if job.sequence is not None and self._running.pop(job.sequence, None) is not None:
                    self._engine.remove(job.sequence)
            self._cancelled.clear()
            while self._waiting and self._engine.num_free:
                job = self._next_job()
                try:
                    job.sequence = self._engine.add(job.prompt, job.settings, job.cache_salt)
                except (TypeError, ValueError) as error:  # the prompt was not checked
                    job.deliver(error)
                else:
                    self._running[job.sequence] = job
            return not self._closing

    def _next_job(self) -> Job:
        """Take the waiting prompt whose owners have the fewest rows."""
        rows = Counter(owner for job in self._running.values() for owner in _with_parents(job.owners))
        fewest = min(self._waiting, key=lambda job: [rows[owner] for owner in _with_parents(job.owners)])
        self._waiting.remove(fewest)
        return fewest

    def _deliver(self, extended: Sequence[RunningSequence]) -> None:
        for sequence in extended:
            with self._changed:
                is_last = sequence.finish_reason is not None or sequence.failure is not None
                job = self._running.pop(sequence, None) if is_last else self._running.get(sequence)
            if job is not None:  # its request has not been ended meanwhile
                for token in WrittenToken.new_of(sequence):
                    job.deliver(token)
                if sequence.failure is not None:
                    job.deliver(sequence.failure)

    def _restart(self, error: Exception) -> bool:
        """Start new workers, as often as it takes; false if it is time to end."""
        while True:
            delay = self._next_delay()
            with self._changed:
                self.failure = error
                self._retry_after = max(1, math.ceil(delay))
            self._fail(error)
            number, most = len(self._failure_times), self._restarts.max_restarts
            if number > most:
                _log.error("%s; giving up after %d restarts in %g s", headline(error), most, self._restarts.window)
                self.has_given_up = True
                return False
            _log.error("%s; starting new workers in %g s (restart %d of %d)", headline(error), delay, number, most)
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
        """Seconds before the next restart, after one failure more."""
        now = time.monotonic()
        self._failure_times = [at for at in self._failure_times if now - at < self._restarts.window] + [now]
        delay = self._restarts.first_delay * 2.0 ** min(len(self._failure_times) - 1, 60)
        return min(delay, self._restarts.longest_delay)

    def _fail(self, error: Exception) -> None:
        """End what waits or runs."""
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
        self._fail_running(error)
        for job in waiting:
            job.deliver(error)

    def _fail_running(self, error: Exception) -> None:
        with self._changed:
            jobs = list(self._running.values())
            self._running.clear()
        for job in jobs:
            job.deliver(error)


def _with_parents(owners: tuple[Hashable, ...]) -> list[tuple[Hashable, ...]]:
    """Return each owner with its parents, so that equal names under different parents differ."""
    return [owners[: number + 1] for number in range(len(owners))]


def _closing() -> RequestError:
    return RequestError(503, "the server is closing; try again later", retry_after=1)
