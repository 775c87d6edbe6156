"""Heartbeats: every second each rank tells the others what it is doing, since a stopped rank cannot be asked.

A thread of its own looks at the main thread and sets one key of the job's store. So it costs the same however often a
rank communicates, and works over every transport.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType

import torch.distributed as dist

_INTERVAL = 1.0  # seconds
_SECONDS_TO_END = 1.0
_LONGEST = 600  # characters
_NOT_CALL_SITES = (os.path.dirname(__file__), os.path.dirname(dist.__path__[0]), threading.__file__)

_heartbeat: "_Heartbeat | None" = None
_step: int | None = None


def report_step(step: int) -> None:
    """Record that this rank begins a training step, for `last_heartbeat`. It costs nothing.

    Args:
        step: counted from 1.
    """
    global _step  # noqa: PLW0603 - the process is in one step
    _step = step


def start_heartbeat(rank: int, store: dist.Store) -> None:
    """Tell the other ranks every second what this process's main thread is doing, until `stop_heartbeat`."""
    global _heartbeat  # noqa: PLW0603 - the process is one rank
    stop_heartbeat()
    # A thread that is inside torch while Python ends aborts the process.
    atexit.unregister(stop_heartbeat)
    atexit.register(stop_heartbeat)
    _heartbeat = _Heartbeat(rank, store)
    _heartbeat.start()


def stop_heartbeat() -> None:
    """Stop the heartbeat."""
    global _heartbeat, _step  # noqa: PLW0603
    if _heartbeat is not None:
        _heartbeat.end()
    _heartbeat = _step = None


def last_heartbeat(rank: int, store: dist.Store) -> str | None:
    """The time and text of a rank's last heartbeat: step, collective, modules and line of code.

    None if it never did, as in its first second.

    Raises:
        torch.distributed.DistError: the store cannot be reached.
    """
    key = _key(rank)
    if not store.check([key]):
        return None
    text = store.get(key).decode(errors="replace")[:_LONGEST]
    return "".join(character if character.isprintable() else "?" for character in text)


def is_collective(frame: FrameType) -> bool:
    """Whether a collective's function runs in this frame."""
    return frame.f_globals.get("__name__") == "nxd_state.collectives" and not frame.f_code.co_name.startswith("_")


def call_site(frames: Iterable[FrameType]) -> str | None:
    """The innermost line of code outside this package, torch.distributed and threading."""
    sites = [frame for frame in frames if not frame.f_code.co_filename.startswith(_NOT_CALL_SITES)]
    if not sites:
        return None
    code = sites[-1].f_code
    return f"{code.co_filename}:{sites[-1].f_lineno} in {code.co_name}"


class _Heartbeat(threading.Thread):
    def __init__(self, rank: int, store: dist.Store) -> None:
        super().__init__(name="nxd_state heartbeat", daemon=True)
        self._key, self._store = _key(rank), store
        self._ended = threading.Event()

    def run(self) -> None:
        with suppress(RuntimeError):  # whoever serves the store has ended
            while not self._ended.wait(_INTERVAL):
                self._store.set(self._key, _describe_main_thread())

    def end(self) -> None:
        self._ended.set()
        self.join(_SECONDS_TO_END)


def _key(rank: int) -> str:
    return f"nxd_state/heartbeat_of_rank_{rank}"


def _describe_main_thread() -> str:
    frames = list(_frames_of_main_thread())[::-1]  # outermost first
    places = [] if _step is None else [f"in step {_step}"]
    places += [frame.f_code.co_name for frame in frames if is_collective(frame)][:1]
    modules = [module for frame in frames for module in _module_of(frame)]
    if modules:
        places.append("forward of " + " > ".join(modules[-3:]))
    site = call_site(frames)
    if site is not None:
        places.append(site)
    return f"at {time.strftime('%H:%M:%S', time.gmtime())} UTC [{'; '.join(places)}]"


def _frames_of_main_thread() -> Iterator[FrameType]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while isinstance(frame, FrameType):  # anything else was seen while another thread compiled
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> list[str]:
    """The module whose forward runs, by the code's name: reading a running frame's locals would keep tensors alive."""
    code = frame.f_code
    is_forward = code.co_name == "forward" and code.co_varnames[:1] == ("self",)
    return code.co_qualname.split(".")[-2:-1] if is_forward else []
