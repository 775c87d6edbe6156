"""Threads that parse, check and tokenize the bodies of requests, divided among clients."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

_THREADS = 4
_THREADS_OF_ADDRESS = 2

# Reading a body of this size takes a millisecond or so, unless its chat template loops.
_SMALL_BODY_BYTES = 1 << 13


@dataclass(frozen=True)
class Client:
    """Who sent a request.

    Attributes:
        address: network address; the batch is divided evenly among addresses.
        user: credentials that were sent along, which tell apart the users of one address, such as a proxy's.
    """

    address: str = ""
    user: str = ""


ANYBODY = Client()


class BodyReaders:
    """Reads bodies outside the event loop. Small ones do not wait for large ones, nor a client for another's.

    A chat template may loop until it is ended, after seconds. So one body of a client is read at a time, of either
    size, and two of an address; the other threads are left to others.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_THREADS, "nxd-trace-small-bodies")
        self._large = ThreadPoolExecutor(_THREADS, "nxd-trace-large-bodies")
        self._turns: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, client: Client, num_bytes: int, read: Callable[[], T]) -> T:
        """What reading gives, in a thread, when it is the client's turn.

        Args:
            client: client that sends the body.
            num_bytes: number of bytes of the body.
            read: called once.
        """
        is_small = num_bytes <= _SMALL_BODY_BYTES
        of_client = self._turns_of((is_small, client.address, client.user), 1)
        of_address = self._turns_of((is_small, client.address), _THREADS_OF_ADDRESS)
        async with of_client, of_address:
            threads = self._small if is_small else self._large
            return await asyncio.get_running_loop().run_in_executor(threads, read)

    def close(self) -> None:
        """Drop what waits; what is being read is not waited for."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    def _turns_of(self, owner: Hashable, number: int) -> asyncio.Semaphore:
        return self._turns.setdefault(owner, asyncio.Semaphore(number))
