"""How long this process has waited for other ranks; the rest of a step is its own work.

The main thread alone is counted: backward runs in it on the CPU. On an accelerator a caller does not wait, its queue
does, so nothing is counted there.
"""

import threading
import time

_seconds = 0.0
_depth = 0


def wait_seconds() -> float:
    """Seconds that the main thread has spent in collectives and messages since the process began, on the CPU."""
    return _seconds


def begin_wait() -> float | None:
    """Begin to wait; pass the result to `end_wait`. Waits may be nested."""
    global _depth  # noqa: PLW0603 - the process has one main thread
    if threading.get_ident() != threading.main_thread().ident:
        return None
    _depth += 1
    return time.perf_counter()


def end_wait(began: float | None) -> None:
    """End the wait that `begin_wait` began."""
    global _depth, _seconds  # noqa: PLW0603
    if began is None:
        return
    _depth -= 1
    if _depth == 0:
        _seconds += time.perf_counter() - began
