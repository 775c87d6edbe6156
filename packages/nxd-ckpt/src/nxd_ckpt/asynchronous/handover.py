"""From the caller's thread, which fills slices of the arena, to the thread that has them written, and back.

A save that fits into the arena is one slice, without any waiting. A larger one alternates between two halves of it.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """The next `num_bytes` bytes of a data file's payload lie in the arena from byte `start` on."""

    start: int
    num_bytes: int


class Stopped(Exception):
    """The other side has given up; why is known there."""


class Handover:
    """Slices on their way, at most `num_slots` of them filled and not written yet."""

    def __init__(self, num_slots: int) -> None:
        self._changed = threading.Condition()
        self._num_slots = num_slots
        self._filled: list[Slice] = []
        self._num_put = 0
        self._num_written = 0
        self._complete = False
        self._stopped = False
        self._error: Exception | None = None

    def wait_for_slot(self) -> int:
        """Returns the number of a slot that may be filled.

        Raises:
            Stopped: nothing more is going to be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._num_put - self._num_written < self._num_slots)
            if self._stopped:
                raise Stopped
            return self._num_put % self._num_slots

    def put(self, filled: Slice) -> None:
        """Hands a filled slot over."""
        with self._changed:
            self._filled.append(filled)
            self._num_put += 1
            self._changed.notify_all()

    def complete(self) -> None:
        """Nothing will follow what has been put."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def stop(self, error: Exception | None = None) -> None:
        """All is written, or either side gives up: whoever waits here is released.

        Args:
            error: why the rest of the slices will never come.
        """
        with self._changed:
            self._stopped = True
            self._error = self._error or error
            self._changed.notify_all()

    def slices(self) -> Iterator[Slice]:
        """What has been put, in order; asking for the next one says that the one before is written.

        Raises:
            Stopped: the rest will never come; or the error that is why.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._filled or self._complete)
                if self._filled:
                    following = self._filled.pop(0)
                elif self._complete:
                    return
                else:
                    raise self._error or Stopped
            yield following
            with self._changed:
                self._num_written += 1
                self._changed.notify_all()

    def wait_until_stopped(self) -> None:
        """Returns when the arena is no longer in use here."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped)
