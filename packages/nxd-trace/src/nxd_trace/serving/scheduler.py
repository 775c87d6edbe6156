"""A thread that steps the batch, and its queue of prompts."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from nxd_trace.errors import WorkerError
from nxd_trace.generation import GenerationEngine, RunningSequence, SamplingSettings
from nxd_trace.generation.engine import FinishReason
from nxd_trace.serving.errors import RequestError


@dataclass(frozen=True)
class WrittenToken:
    """One token of one prompt.

    Attributes:
        token: its id.
        finish_reason: None if more will follow.
    """

    token: int
    finish_reason: FinishReason | None


Deliver = Callable[[WrittenToken | Exception], None]


@dataclass(eq=False)
class Job:
    """One prompt that waits or runs.

    Attributes:
        prompt: token ids.
        settings: how its tokens are chosen.
        deliver: called in the scheduler's thread with each token, or with the error that ends the job.
    """

    prompt: Sequence[int]
    settings: SamplingSettings
    deliver: Deliver
    sequence: RunningSequence | None = None


class Scheduler:
    """Runs prompts as rows of the batch come free, in the order they came.

    Args:
        engine: the batch; from now on only this scheduler's thread steps it.
        max_waiting: prompts that may wait for a row; more are refused.

    Attributes:
        failure: what ended the scheduler's thread, such as a dead worker; None while all is well.
    """

    def __init__(self, engine: GenerationEngine, max_waiting: int = 64) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: dict[RunningSequence, Job] = {}
        self._cancelled: list[Job] = []
        self._changed = threading.Condition()
        self._closing = False
        self.failure: Exception | None = None
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

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the prompts of a request: all of them, or none.

        Raises:
            RequestError: a prompt does not fit the model (400), the queue is full (429), or the model has failed (503).
        """
        for job in jobs:
            try:
                self._engine.check(job.prompt, job.settings)
            except ValueError as error:
                raise RequestError(400, str(error), "max_tokens") from error
        with self._changed:
            if self.failure is not None or self._closing:
                raise RequestError(503, f"the model does not run: {self.failure or 'the server is closing'}")
            # Prompts that will find a free row at the next step do not count as waiting.
            room = self._max_waiting + self._engine.batch_size - len(self._running) - len(self._waiting)
            if len(jobs) > room:
                raise RequestError(429, f"the queue is full ({self._max_waiting} prompts wait); try again later")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Drop prompts whose client no longer waits; finished ones are left alone."""
        with self._changed:
            self._waiting = deque(job for job in self._waiting if job not in jobs)
            self._cancelled.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the step that it is in; what waits or runs is delivered an error."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while self._admit():
            try:
                extended = self._engine.step()
            except FloatingPointError as error:  # of these prompts, maybe; others may fare better
                self._engine.clear()
                self._fail_running(error)
            except Exception as error:
                self._stop(error)
                return
            else:
                self._deliver(extended)
        self._stop(RuntimeError("the server is closing"))

    def _admit(self) -> bool:
        """Wait for something to do, and give waiting prompts their rows; false if it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting or self._running)
            for job in self._cancelled:
                if job.sequence is not None and self._running.pop(job.sequence, None) is not None:
                    self._engine.remove(job.sequence)
            self._cancelled.clear()
            while self._waiting and self._engine.num_free:
                job = self._waiting.popleft()
                job.sequence = self._engine.add(job.prompt, job.settings)
                self._running[job.sequence] = job
            return not self._closing

    def _deliver(self, extended: Sequence[RunningSequence]) -> None:
        for sequence in extended:
            job = self._running[sequence]
            if sequence.finish_reason is not None or sequence.failure is not None:
                with self._changed:
                    del self._running[sequence]
            job.deliver(sequence.failure or WrittenToken(sequence.tokens[-1], sequence.finish_reason))

    def _stop(self, error: Exception) -> None:
        with self._changed:
            self.failure = error
        with contextlib.suppress(WorkerError):
            self._engine.clear()  # for who uses it next
        self._fail_running(error)

    def _fail_running(self, error: Exception) -> None:
        with self._changed:
            jobs = list(self._running.values())
            self._running.clear()
            if self.failure is not None:
                jobs += self._waiting
                self._waiting.clear()
        for job in jobs:
            job.deliver(error)
