"""The word on which a process sleeps while it waits for others, and how they wake it.

A process that is about to sleep first says so, then looks once more whether what it waits for is there, and sleeps
only if its doorbell still has the value from before that look. Whoever publishes something first writes it, then
looks who sleeps, and gives those another value. Between its write and its look each needs a fence, since a core may
read before its own store is seen.

Sleeping itself is the kernel's: Linux's futex, see futex(2).
"""

import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Iterable

from nxd_state.shared_memory.segment import FIRST_FREE_BYTE, OwnSegment, Segment

_SYS_FUTEX = 202  # of x86-64, the one machine that this transport serves, see `host`
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: waiter and waker are different processes
_ALL = 2**31 - 1
_NANOSECONDS = 1_000_000_000
_TO_BE_LOOKED_AT = (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR)


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
    """Sleep while the 32-bit word at `address` is `value`: until it is waked, a signal comes, or the time is over.

    Raises:
        OSError: the kernel refuses, as where a sandbox forbids the call.
    """
    nanoseconds = int(seconds * _NANOSECONDS)
    timeout = _Timespec(nanoseconds // _NANOSECONDS, nanoseconds % _NANOSECONDS)
    if _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, value, ctypes.addressof(timeout), None, 0) < 0:
        error = ctypes.get_errno()
        if error not in _TO_BE_LOOKED_AT:
            raise OSError(error, os.strerror(error))


def futex_wake(address: int) -> None:
    """Wake everyone who sleeps on the word at `address`."""
    _syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _ALL, None, None, 0)


_SIZE = 4096
_VALUE, _SLEEPING = FIRST_FREE_BYTE // 8, FIRST_FREE_BYTE // 8 + 8  # words, in lines of their own
ANYTHING = 1  # what a sleeper expects, as a code; others are made by `channel`
_PID_BITS = 22  # as many as Linux ever uses; the rest of the word that can be compared counts
_COUNTS = 2**10

_lock = threading.Lock()
_counts = itertools.count()


def fence() -> None:
    """Let no later read of this thread pass its earlier writes: taking a lock is an atomic instruction."""
    with _lock:
        pass


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603  (another thread of the parent may have held it during the fork)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Doorbell:
    """That of this process; made once."""

    def __init__(self) -> None:
        self._segment = OwnSegment(_SIZE)
        self._words = self._segment.words
        self._address = self._segment.address + FIRST_FREE_BYTE
        self._sleepers = 0
        self._sleepers_lock = threading.Lock()
        self.handle = self._segment.handle

    def check(self) -> None:
        """Raises OSError where the kernel lets nobody sleep on it."""
        futex_wait(self._address, self._words[_VALUE] + 1, 0.0)

    def listen(self) -> int:
        """Say that a thread is about to sleep; look whether that is needed, then `sleep` or not, then `rest`."""
        with self._sleepers_lock:
            self._sleepers += 1
            self._words[_SLEEPING] = ANYTHING
        fence()
        return self._words[_VALUE]

    def sleep(self, value: int, seconds: float) -> None:
        """Sleep until somebody rings; not at all if somebody did since `listen` gave `value`."""
        futex_wait(self._address, value, seconds)

    def expect(self, code: int) -> None:
        """After `listen`: be waked by nothing but what has this code, unless another thread sleeps as well."""
        with self._sleepers_lock:
            if self._sleepers == 1:
                self._words[_SLEEPING] = code

    def rest(self) -> None:
        """Say that a thread that listened sleeps no more."""
        with self._sleepers_lock:
            self._sleepers -= 1
            self._words[_SLEEPING] = ANYTHING if self._sleepers else 0


class RemoteDoorbell:
    """That of another process."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._address = segment.address + FIRST_FREE_BYTE
        self._segment = segment

    def ring(self, code: int) -> None:
        """Wake it if it sleeps and expects this. Call `fence` between the write that it waits for and this."""
        expected = self._words[_SLEEPING]
        if expected and (expected == code or ANYTHING in (expected, code)):
            # Another value than any that is in use: no other process, and not this one for a while, writes it.
            self._words[_VALUE] = os.getpid() | next(_counts) % _COUNTS << _PID_BITS
            futex_wake(self._address)


def ring_all(doorbells: Iterable[RemoteDoorbell], code: int) -> None:
    """Wake all that sleep and expect this, after it has been written."""
    fence()
    for doorbell in doorbells:
        doorbell.ring(code)
