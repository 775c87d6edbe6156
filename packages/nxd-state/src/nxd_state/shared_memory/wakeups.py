"""Event counts: how a process sleeps while it waits for others, and how they wake it.

A process that is about to sleep first announces it, checks its condition once more, and sleeps only if its event count
still has the value from before that check. A process that publishes something first writes it, then checks who sleeps,
and changes the event counts of those. Between its write and its check each needs a fence, since a core may read before
its own store is visible.

Sleeping itself is the kernel's: Linux's futex, see futex(2).
"""

import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Iterable

from nxd_state.shared_memory.memory import FIRST_FREE_BYTE, OwnSegment, Segment

_SYS_FUTEX = 202  # of x86-64, the only machine with this transport, see `memory`
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: waiter and waker are different processes
_ALL = 2**31 - 1
_NANOSECONDS = 1_000_000_000
_RECHECK = (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall  # a CDLL's functions run without the interpreter's lock
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)


def futex_wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`: until woken, a signal arrives, or the time is over."""
    nanoseconds = int(seconds * _NANOSECONDS)
    timeout = _Timespec(nanoseconds // _NANOSECONDS, nanoseconds % _NANOSECONDS)
    if _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, value, ctypes.addressof(timeout), None, 0) < 0:
        error = ctypes.get_errno()
        if error not in _RECHECK:
            raise OSError(error, os.strerror(error))


def futex_wake(address: int) -> None:
    """Wake all threads that sleep on the word at `address`."""
    _syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _ALL, None, None, 0)


_SIZE = 4096
_VALUE, _SLEEPING = FIRST_FREE_BYTE // 8, FIRST_FREE_BYTE // 8 + 8  # words, in lines of their own
ANYTHING = 1  # the code of a sleeper that any event wakes; the others are those of `SharedChannel`
_PID_BITS = 22  # as many as Linux ever uses; the rest of the word that can be compared counts
_COUNTS = 2**10

_lock = threading.Lock()
_counts = itertools.count()


def fence() -> None:
    """Keep later reads of this thread behind its earlier writes: taking a lock is an atomic instruction."""
    with _lock:
        pass


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603  (another thread of the parent may have held it during the fork)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class EventCount:
    """The event count of this process; created once."""

    def __init__(self) -> None:
        self._segment = OwnSegment(_SIZE)
        self._words = self._segment.words
        self._address = self._segment.address + FIRST_FREE_BYTE
        self._sleepers = 0
        self._sleepers_lock = threading.Lock()
        self.handle = self._segment.handle

    def check(self) -> None:
        """Raise an OSError if the kernel refuses to let a process sleep on it."""
        futex_wait(self._address, self._words[_VALUE] + 1, 0.0)

    def prepare_wait(self) -> int:
        """Announce that a thread may sleep; returns the count.

        Check the condition next, then `wait` if it does not hold, then `finish_wait` in either case.
        """
        with self._sleepers_lock:
            self._sleepers += 1
            self._words[_SLEEPING] = ANYTHING
        fence()
        return self._words[_VALUE]

    def wait(self, value: int, seconds: float) -> None:
        """Sleep until a peer notifies; return at once if one has since `prepare_wait` returned `value`."""
        futex_wait(self._address, value, seconds)

    def wait_only_for(self, code: int) -> None:
        """After `prepare_wait`: be woken only by this code, unless another thread sleeps as well."""
        with self._sleepers_lock:
            if self._sleepers == 1:
                self._words[_SLEEPING] = code

    def finish_wait(self) -> None:
        """Announce that the thread no longer sleeps."""
        with self._sleepers_lock:
            self._sleepers -= 1
            self._words[_SLEEPING] = ANYTHING if self._sleepers else 0


class PeerEventCount:
    """The event count of another process."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._address = segment.address + FIRST_FREE_BYTE
        self._segment = segment

    def notify(self, code: int) -> None:
        """Wake it if it sleeps and waits for this code. Call `fence` after the write that it waits for, before this."""
        expected = self._words[_SLEEPING]
        if expected and (expected == code or ANYTHING in (expected, code)):
            # A value not in use: no other process writes it, nor does this one for a while.
            self._words[_VALUE] = os.getpid() | next(_counts) % _COUNTS << _PID_BITS
            futex_wake(self._address)


def notify_all(peers: Iterable[PeerEventCount], code: int) -> None:
    """Wake all peers that sleep and wait for this code, which has been written."""
    fence()
    for peer in peers:
        peer.notify(code)
