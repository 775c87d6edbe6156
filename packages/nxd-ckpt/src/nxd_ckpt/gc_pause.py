"""Pauses Python's garbage collector while hundreds of thousands of small tuples are created.

They cannot be part of a cycle, but the collector would walk through all of them repeatedly, which takes half the time.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the collector inside the block, and restores its state afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
