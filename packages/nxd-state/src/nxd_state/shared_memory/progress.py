"""Advancing collectives and messages: a waiting caller does it; a thread does it for asynchronous ones.

Operations run in steps (see `channel.Steps`) and are queued: those of one queue run one after the other, in the order
in which they began, which is the same on all ranks; different queues do not wait for each other. A waiting caller
advances all queues of the process, polls for a short while, yielding the core in between, and then sleeps until a peer
notifies it.
"""

import atexit
import os
import threading
import time
from collections import deque

import torch
from torch import Tensor

from nxd_state.collectives.transport import begin_wait, end_wait
from nxd_state.shared_memory.channel import Awaited, LostPeerError, SharedChannel, SharedMemoryError, Steps
from nxd_state.shared_memory.wakeups import EventCount

# Steps are hidden from the caller's dispatch modes, such as selective checkpointing's, which replay the operators that
# they saw: whether the caller or the thread advances a step is a matter of timing.
_num_dispatch_modes = torch._C._len_torch_dispatch_stack  # asking is cheaper than entering the context
_OutsideDispatchModes = torch._C._DisableTorchDispatch

_SPIN_SECONDS = 200e-6  # about twice the time that sleeping and waking takes
_LONGEST_SLEEP = 0.05  # seconds; then the peers are looked at
_GRACE_SECONDS = 1e-3  # for so long, an asynchronous operation is left to a caller that may wait for it


class PendingOperation:
    """A collective or message under way."""

    __slots__ = ("done", "error", "queue", "result", "steps")

    def __init__(self, queue: "OperationQueue", steps: Steps) -> None:
        self.queue, self.steps = queue, steps
        self.done = False
        self.error: BaseException | None = None
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the result."""
        if not self.done:
            self.queue.progress.drive(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class OperationQueue:
    """Operations of one channel that run one after the other."""

    def __init__(self, channel: SharedChannel, progress: "ProgressEngine") -> None:
        self.channel, self.progress = channel, progress
        self.operations: deque[PendingOperation] = deque()
        self.awaited: Awaited | None = None

    def advance(self) -> None:
        """Advance as far as possible without waiting."""
        if self.awaited is not None and self.channel.lacks(self.awaited):
            return
        operations = self.operations
        while operations:
            operation = operations[0]
            try:
                self.awaited = _next(operation.steps)
                if self.channel.lacks(self.awaited):
                    return
            except StopIteration as end:
                operation.result = end.value
                operation.done = True
                operations.popleft()
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):  # as KeyboardInterrupt: of this thread, not of the operation
                    raise
        self.awaited = None

    def fail(self, error: BaseException) -> None:
        """Mark the channel as unusable: this rank and its peers no longer agree on the round."""
        self.channel.error = error
        self.channel.leave(f"{type(error).__name__}: {error}", failed=True)
        for operation in self.operations:
            operation.error, operation.done = error, True
        self.operations.clear()
        self.awaited = None


def _next(steps: Steps) -> Awaited:
    if not _num_dispatch_modes():
        return next(steps)
    with _OutsideDispatchModes():
        return next(steps)


class ProgressEngine:
    """All operations under way in this process."""

    def __init__(self, event_count: EventCount) -> None:
        self._event_count = event_count
        self._lock = threading.Lock()
        self._busy: dict[OperationQueue, None] = {}
        self._waiting_threads = 0
        self._waiting_lock = threading.Lock()
        self._left_alone = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False
        self.is_foreign = False  # a copy that a fork has made

    def disown(self) -> None:
        """Mark this as the parent's, in a forked process."""
        self.is_foreign = True

    def begin(self, queue: OperationQueue, steps: Steps) -> PendingOperation:
        """Begin an operation and advance it as far as possible; the thread does the rest."""
        operation = self._enter(queue, steps)
        if not operation.done:
            if self._thread is None:
                self._start_thread()
            self._left_alone.set()
        return operation

    def complete(self, queue: OperationQueue, steps: Steps) -> Tensor:
        """Begin an operation and wait for its result."""
        return self._enter(queue, steps).wait()

    def drive(self, operation: PendingOperation) -> None:
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

    def abandon(self, channel: SharedChannel, error: SharedMemoryError) -> None:
        """Fail the operations under way on a channel."""
        with self._lock:
            channel.error = channel.error or error
            for queue in [queue for queue in self._busy if queue.channel is channel]:
                queue.fail(error)
                del self._busy[queue]

    def _enter(self, queue: OperationQueue, steps: Steps) -> PendingOperation:
        if self.is_foreign:
            raise SharedMemoryError(
                f"{queue.channel.title} belongs to the process that this one was forked from; communicate there, or "
                "initialize model parallelism after the fork"
            )
        if queue.channel.error is not None:
            raise SharedMemoryError(
                f"{queue.channel.title} can no longer be used: {queue.channel.error}"
            ) from queue.channel.error
        operation = PendingOperation(queue, steps)
        with self._lock:
            queue.operations.append(operation)
            if len(queue.operations) == 1:
                queue.advance()
            if queue.operations:
                self._busy[queue] = None
        return operation

    def _advance(self) -> None:
        with self._lock:
            for queue in list(self._busy):
                queue.advance()
                if not queue.operations:
                    del self._busy[queue]

    def _spin(self, operation: PendingOperation) -> bool:
        end = time.perf_counter() + _SPIN_SECONDS
        while True:
            self._advance()
            if operation.done:
                return True
            if time.perf_counter() > end:
                return False
            os.sched_yield()  # where there are more ranks than cores, a peer can run now

    def _sleep_until_done(self, operation: PendingOperation) -> None:
        began = looked = time.monotonic()
        while True:
            self._wait_for_event(operation)
            if operation.done:
                return
            now = time.monotonic()
            thorough = now - looked > _LONGEST_SLEEP
            if thorough:
                looked = now
            self._check(operation.queue, now - began, thorough=thorough)

    def _wait_for_event(self, operation: PendingOperation | None) -> None:
        """Advance everything; if `operation` is not done then, sleep until something may have changed."""
        value = self._event_count.prepare_wait()
        try:
            self._advance()
            if (self._busy if operation is None else not operation.done) and self._narrow_wait():
                self._event_count.wait(value, _LONGEST_SLEEP)
        finally:
            self._event_count.finish_wait()
        self._advance()

    def _narrow_wait(self) -> bool:
        """Narrow the events that wake this process; returns whether to sleep at all."""
        with self._lock:
            queues = list(self._busy)
        if len(queues) != 1:
            return True
        (queue,) = queues
        awaited = queue.awaited
        code = None if awaited is None else queue.channel.code_of_first(awaited)
        if code is not None:
            self._event_count.wait_only_for(code)
        return code is not None

    def _check(self, queue: OperationQueue, seconds: float, *, thorough: bool) -> None:
        awaited = queue.awaited
        if awaited is None:
            return
        error = _check_peers(queue.channel, awaited, seconds, thorough=thorough)
        if error is None:
            return
        self._advance()  # the peer may have arrived just before it left
        if queue.awaited is awaited or queue.awaited == awaited:
            self.abandon(queue.channel, error)

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
                self._wait_for_event(None)


def _check_peers(channel: SharedChannel, awaited: Awaited, seconds: float, *, thorough: bool) -> LostPeerError | None:
    """The error to raise on a rank that has waited for `seconds`, if any.

    Args:
        channel: the channel of the group.
        awaited: the condition that it waits for.
        seconds: how long it has waited.
        thorough: whether to check the peers' processes as well, which takes some microseconds each.
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
                f"rank {channel.ranks[peer]} has left {channel.title}: its process {process.pid} has ended while "
                f"rank {channel.ranks[channel.rank]} waited for it; see what that rank printed"
            )
    if missing and seconds > channel.timeout:
        peer = missing[0]
        process = channel.process(peer)
        return LostPeerError(
            f"rank {channel.ranks[peer]} of {channel.title} did not reach what rank {channel.ranks[channel.rank]} "
            f"waits for in {channel.timeout:g} s: its process {process.pid} {process.condition()}; "
            "NXD_TIMEOUT or initialize_model_parallel(timeout=...) sets how many seconds to wait"
        )
    return None
