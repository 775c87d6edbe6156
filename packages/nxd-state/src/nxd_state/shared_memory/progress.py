"""Advancing collectives and messages: a caller that waits does it; a thread does it for asynchronous ones.

Operations run in steps (see `channel.Steps`) and are queued in lanes: those of one lane run one after the other, in the
order in which they were begun, which is the same on all ranks; different lanes do not wait for each other. A waiting
caller advances all lanes of the process, polls for a short while, yielding the core in between, and then sleeps until
a peer rings.
"""

import atexit
import os
import threading
import time
from collections import deque

from torch import Tensor

from nxd_state.collectives.waits import begin_wait, end_wait
from nxd_state.shared_memory.channel import Awaited, Channel, LostPeerError, SharedMemoryError, Steps
from nxd_state.shared_memory.dispatch_modes import OutsideOfModes, any_mode
from nxd_state.shared_memory.doorbell import Doorbell

_SPIN_SECONDS = 200e-6  # about twice what it takes to sleep and be waked
_LONGEST_SLEEP = 0.05  # seconds; then the peers are looked at
_GRACE_SECONDS = 1e-3  # for so long, an asynchronous operation is left to a caller that may wait for it


class Operation:
    """A collective or message under way."""

    __slots__ = ("done", "error", "lane", "result", "steps")

    def __init__(self, lane: "Lane", steps: Steps) -> None:
        self.lane, self.steps = lane, steps
        self.done = False
        self.error: BaseException | None = None
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        """Its result, once it is there.

        Raises:
            SharedMemoryError: it will never be.
        """
        if not self.done:
            self.lane.progress.drive(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Lane:
    """Operations of one channel that run one after the other."""

    def __init__(self, channel: Channel, progress: "Progress") -> None:
        self.channel, self.progress = channel, progress
        self.queue: deque[Operation] = deque()
        self.awaited: Awaited | None = None

    def advance(self) -> None:
        """Advance as far as possible without waiting."""
        if self.awaited is not None and self.channel.lacks(self.awaited):
            return
        queue = self.queue
        while queue:
            operation = queue[0]
            try:
                self.awaited = _next(operation.steps)
                if self.channel.lacks(self.awaited):
                    return
            except StopIteration as end:
                operation.result = end.value
                operation.done = True
                queue.popleft()
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):  # as KeyboardInterrupt: of this thread, not of the operation
                    raise
        self.awaited = None

    def fail(self, error: BaseException) -> None:
        """Mark the channel as unusable: the peers have lost count of this rank's turns."""
        self.channel.error = error
        self.channel.leave(f"{type(error).__name__}: {error}", failed=True)
        for operation in self.queue:
            operation.error, operation.done = error, True
        self.queue.clear()
        self.awaited = None


def _next(steps: Steps) -> Awaited:
    if not any_mode():
        return next(steps)
    with OutsideOfModes():
        return next(steps)


class Progress:
    """All that is under way in this process."""

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._lock = threading.Lock()
        self._busy: dict[Lane, None] = {}
        self._waiting_threads = 0
        self._waiting_lock = threading.Lock()
        self._left_alone = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False
        self.is_foreign = False  # a copy that a fork has made

    def disown(self) -> None:
        """In a forked process: this belongs to the parent, which continues with it."""
        self.is_foreign = True

    def begin(self, lane: Lane, steps: Steps) -> Operation:
        """Begin an operation and advance it as far as possible; the thread does the rest."""
        operation = self._enter(lane, steps)
        if not operation.done:
            if self._thread is None:
                self._start_thread()
            self._left_alone.set()
        return operation

    def complete(self, lane: Lane, steps: Steps) -> Tensor:
        """Begin an operation and wait for its result."""
        return self._enter(lane, steps).wait()

    def drive(self, operation: Operation) -> None:
        """Advance everything until `operation` is done."""
        with self._waiting_lock:
            self._waiting_threads += 1
        began = begin_wait()
        try:
            if not self._spin(operation):
                self._sleep_until_done(operation)
        finally:
            end_wait(began)
            with self._waiting_lock:
                self._waiting_threads -= 1
            if self._busy and self._thread is not None:
                self._left_alone.set()

    def abandon(self, channel: Channel, error: SharedMemoryError) -> None:
        """End what is under way on a channel."""
        with self._lock:
            channel.error = channel.error or error
            for lane in [lane for lane in self._busy if lane.channel is channel]:
                lane.fail(error)
                del self._busy[lane]

    def _enter(self, lane: Lane, steps: Steps) -> Operation:
        if self.is_foreign:
            raise SharedMemoryError(
                f"{lane.channel.title} belongs to the process that this one was forked from; communicate there, or "
                "initialise model parallelism after the fork"
            )
        if lane.channel.error is not None:
            raise SharedMemoryError(
                f"{lane.channel.title} can no longer be used: {lane.channel.error}"
            ) from lane.channel.error
        operation = Operation(lane, steps)
        with self._lock:
            lane.queue.append(operation)
            if len(lane.queue) == 1:
                lane.advance()
            if lane.queue:
                self._busy[lane] = None
        return operation

    def _advance(self) -> None:
        with self._lock:
            for lane in list(self._busy):
                lane.advance()
                if not lane.queue:
                    del self._busy[lane]

    def _spin(self, operation: Operation) -> bool:
        end = time.perf_counter() + _SPIN_SECONDS
        while True:
            self._advance()
            if operation.done:
                return True
            if time.perf_counter() > end:
                return False
            os.sched_yield()  # where there are more ranks than cores, a peer can run now

    def _sleep_until_done(self, operation: Operation) -> None:
        began = looked = time.monotonic()
        while True:
            self._listen(operation)
            if operation.done:
                return
            now = time.monotonic()
            thorough = now - looked > _LONGEST_SLEEP
            if thorough:
                looked = now
            self._check(operation.lane, now - began, thorough=thorough)

    def _listen(self, operation: Operation | None) -> None:
        """Go on; if `operation` is not done by that, sleep until something may have changed."""
        value = self._doorbell.listen()
        try:
            self._advance()
            if (self._busy if operation is None else not operation.done) and self._expect():
                self._doorbell.sleep(value, _LONGEST_SLEEP)
        finally:
            self._doorbell.rest()
        self._advance()

    def _expect(self) -> bool:
        """Tell the doorbell what to be waked for; whether to sleep at all."""
        with self._lock:
            lanes = list(self._busy)
        if len(lanes) != 1:
            return True
        (lane,) = lanes
        awaited = lane.awaited
        code = None if awaited is None else lane.channel.code_of_first(awaited)
        if code is not None:
            self._doorbell.expect(code)
        return code is not None

    def _check(self, lane: Lane, seconds: float, *, thorough: bool) -> None:
        awaited = lane.awaited
        if awaited is None:
            return
        error = _check_peers(lane.channel, awaited, seconds, thorough=thorough)
        if error is None:
            return
        self._advance()  # it may have come to this just before it went
        if lane.awaited is awaited or lane.awaited == awaited:
            self.abandon(lane.channel, error)

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="nxd_state shared memory", daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)

    def _end_thread(self) -> None:
        self._ended = True
        self._left_alone.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _serve(self) -> None:
        while not self._ended:
            self._left_alone.wait()
            time.sleep(_GRACE_SECONDS)
            self._left_alone.clear()  # whoever waits now will set it again
            while self._busy and not self._waiting_threads and not self._ended:
                self._listen(None)


def _check_peers(channel: Channel, awaited: Awaited, seconds: float, *, thorough: bool) -> LostPeerError | None:
    """What to raise on a rank that has waited for `seconds`, if anything.

    Args:
        channel: of the group.
        awaited: what it waits for.
        seconds: how long.
        thorough: whether to look at the peers' processes as well, which takes some microseconds each.
    """
    reason = channel.reason_of_leaver(awaited)
    if reason is not None:
        return LostPeerError(reason)
    if not thorough:
        return None
    missing = channel.missing(awaited)
    for peer in missing:
        process = channel.process(peer)
        if process.condition() == "has ended":
            return LostPeerError(
                f"rank {channel.ranks[peer]} is gone from {channel.title}: its process {process.pid} has ended while "
                f"rank {channel.ranks[channel.rank]} waited for it; see what that rank printed"
            )
    if missing and seconds > channel.timeout:
        peer = missing[0]
        process = channel.process(peer)
        return LostPeerError(
            f"rank {channel.ranks[peer]} of {channel.title} did not come to what rank {channel.ranks[channel.rank]} "
            f"waits for in {channel.timeout:g} s: its process {process.pid} {process.condition()}; "
            "NXD_TIMEOUT or initialize_model_parallel(timeout=...) sets how many seconds to wait"
        )
    return None
