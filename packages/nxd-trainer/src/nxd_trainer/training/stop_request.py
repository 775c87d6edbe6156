"""Stopping on SIGTERM and Ctrl-C at the end of a step, rather than in the middle of one."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Remembers the first SIGTERM or SIGINT; a second one ends the process as usual. A context manager.

    The loop asks `signal_number` between steps, agrees with the other ranks, saves, and leaves.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
