"""Stopping a run between two steps: what the loop asks for, and the signals that ask for it."""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol, Self

STDERR = 2


class StopSignal(Protocol):
    """A stop request that the loop checks once before each step."""

    @property
    def signal_number(self) -> int:
        """Nonzero if this rank wants the run to stop after the next step."""

    @property
    def can_wait(self) -> bool:
        """Whether stopping can wait for an evaluation that is due at that step."""


class StopRequest:
    """Records the first SIGTERM or SIGINT, to stop at the end of a step; a second one ends the process as usual.

    A context manager. The loop checks `signal_number` between steps, agrees with the other ranks, saves, and returns.
    """

    can_wait = False  # the sender of the signal may kill the process some seconds later

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()
        if os.environ.get("RANK", "0") == "0":
            name = signal.Signals(number).name
            said = f"\n{name}: stopping after the current step, with a checkpoint; a second signal ends without one\n"
            with suppress(OSError):  # whoever read it may be gone, as the terminal after a SIGHUP
                os.write(STDERR, said.encode())  # print may be in the middle of another line

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
