"""Items made by a thread before they are asked for."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def read_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The items in their order, of which up to `depth` are made before they are asked for.

    One thread makes them. It begins with the first item that is asked for, and is gone when this generator has come to
    its end, has raised or was closed; what it has made by then in vain is dropped.

    Raises:
        Exception: what `items` raised for an item, with its traceback, when it is that item's turn.
    """

    def make() -> list[T]:
        return list(islice(items, 1))  # nothing at the end

    maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
    try:
        waiting = deque(maker.submit(make) for _ in range(depth + 1))
        while made := waiting.popleft().result():
            yield from made
            waiting.append(maker.submit(make))
    finally:
        maker.shutdown(cancel_futures=True)
