"""Heartbeats: every second each rank tells the others that it is alive, and what it is doing if one of them asks.

A thread sets one key of the job's store and checks another one for questions, so it costs the same however often a rank
communicates, and works over every transport. It reads the main thread's frames only for an answer: CPython can crash or
deadlock there (python/cpython#106883, #111363), which is no risk to take every second of a healthy run. A process that
is stopped cannot answer; its last heartbeat gives the time and the step.
"""

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType

import torch.distributed as dist

_INTERVAL = 1.0  # seconds
_PAUSE = 0.02  # seconds, between two looks for an answer
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
    """Tell the other ranks every second that this one is alive, and answer `ask_ranks`, until `stop_heartbeat`."""
    global _heartbeat  # noqa: PLW0603 - the process is one rank
    stop_heartbeat()
    # A thread that is inside torch while Python ends aborts the process.
    atexit.unregister(stop_heartbeat)
    atexit.register(stop_heartbeat)
    _heartbeat = _Heartbeat(rank, store)
    _heartbeat.send()  # the rank may be stopped within its first second
    _heartbeat.start()


def stop_heartbeat() -> None:
    """Stop the heartbeat."""
    global _heartbeat, _step  # noqa: PLW0603
    if _heartbeat is not None:
        _heartbeat.end()
    _heartbeat = _step = None


def last_heartbeat(rank: int, store: dist.Store) -> str | None:
    """Return the time of a rank's last heartbeat and the step it was in; None if it never sent one.

    Raises:
        torch.distributed.DistError: the store cannot be reached.
    """
    return _read(store, _key("heartbeat", rank))


def ask_ranks(ranks: Iterable[int], store: dist.Store, seconds: float) -> dict[int, str]:
    """Ask ranks what their main threads are doing, once waiting for them has failed.

    Any number of ranks may ask each other at the same time.

    Args:
        ranks: the ranks to ask.
        store: the job's store.
        seconds: how long to wait for the answers; a rank looks for questions every second.

    Returns:
        The answers by rank: time, step, collective, modules and line of code. A rank that is stopped, dead or cut off
        is missing.

    Raises:
        torch.distributed.DistError: the store cannot be reached.
    """
    before = {rank: _read(store, _key("answer", rank)) for rank in ranks}
    for rank in before:
        store.set(_key("question", rank), f"{os.getpid()}/{time.time_ns()}")  # unlike any other question
    answers: dict[int, str] = {}
    give_up = time.monotonic() + seconds
    while len(answers) < len(before) and time.monotonic() < give_up:
        time.sleep(_PAUSE)
        for rank in before.keys() - answers.keys():
            answer = _read(store, _key("answer", rank))
            if answer is not None and answer != before[rank]:  # to this question, or to one asked at the same time
                answers[rank] = answer
    return answers


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
        self._rank, self._store = rank, store
        self._ended = threading.Event()

    def run(self) -> None:
        question = _key("question", self._rank)
        with suppress(RuntimeError):  # whoever serves the store has ended
            answered = _read(self._store, question)  # by an earlier process of this rank, if at all
            while not self._ended.wait(_INTERVAL):
                self.send()
                asked = _read(self._store, question)
                if asked != answered:
                    self._store.set(_key("answer", self._rank), _as_of_now(_places_of_main_thread()))
                    answered = asked

    def send(self) -> None:
        self._store.set(_key("heartbeat", self._rank), _as_of_now([]))

    def end(self) -> None:
        self._ended.set()
        self.join(_SECONDS_TO_END)


def _key(what: str, rank: int) -> str:
    return f"nxd_state/{what}_of_rank_{rank}"


def _read(store: dist.Store, key: str) -> str | None:
    if not store.check([key]):  # `get` would wait for it
        return None
    text = store.get(key).decode(errors="replace")[:_LONGEST]
    return "".join(character if character.isprintable() else "?" for character in text)


def _as_of_now(places: list[str]) -> str:
    places = ([] if _step is None else [f"in step {_step}"]) + places
    return f"at {time.strftime('%H:%M:%S', time.gmtime())} UTC" + (f" [{'; '.join(places)}]" if places else "")


def _places_of_main_thread() -> list[str]:
    frames = list(_frames_of_main_thread())[::-1]  # outermost first
    places = [frame.f_code.co_name for frame in frames if is_collective(frame)][:1]
    modules = [module for frame in frames for module in _module_of(frame)]
    if modules:
        places.append("forward of " + " > ".join(modules[-3:]))
    site = call_site(frames)
    return places if site is None else [*places, site]


def _frames_of_main_thread() -> Iterator[FrameType]:
    collects = gc.isenabled()
    gc.disable()  # a collection while frames are listed can deadlock, in Python 3.11
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
    finally:
        if collects:
            gc.enable()
    while isinstance(frame, FrameType):  # anything else was seen while another thread compiled
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> list[str]:
    """The module whose forward runs, by the code's name: reading a running frame's locals would keep tensors alive."""
    code = frame.f_code
    is_forward = code.co_name == "forward" and code.co_varnames[:1] == ("self",)
    return code.co_qualname.split(".")[-2:-1] if is_forward else []
