"""Sleeping in the kernel until a word of shared memory changes: Linux's futex, see futex(2)."""

import ctypes
import errno
import os

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


def wait(address: int, value: int, seconds: float) -> None:
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


def wake(address: int) -> None:
    """Wake everyone who sleeps on the word at `address`."""
    _syscall(_SYS_FUTEX, address, _FUTEX_WAKE, _ALL, None, None, 0)
