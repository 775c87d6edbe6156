"""SIGTERM while a save goes on: schedulers send it some time before they kill, and that may be enough to finish."""

import os
import signal
import threading
import time
from types import FrameType

from nxd_ckpt.asynchronous import pending

# Launchers and schedulers usually wait 30 seconds before they kill.
GRACE_SECONDS = 20.0


def finish_saves_on_sigterm() -> None:
    """Has SIGTERM wait for saves before it ends the process. Leaves it alone if the program handles it in any way."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _finish_saves_and_die)


def _finish_saves_and_die(signal_number: int, frame: FrameType | None) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for save in pending.in_flight():
        # If it is not staged, its tensors wait for this very thread. Locks may be held by it, so none is used here.
        while save.staged and not save.done() and time.monotonic() < deadline:
            time.sleep(0.02)
    signal.signal(signal_number, signal.SIG_DFL)
    os.kill(os.getpid(), signal_number)
