"""The background saves of each rank of this process, and their errors that have not been reported yet.

A rank is known by its number and the world's size, as several ranks may be threads of one process.
"""

import os
import sys
from collections import defaultdict
from typing import NamedTuple

from nxd_ckpt.asynchronous.handle import AsyncSave


class RankKey(NamedTuple):
    """Which of this process's ranks."""

    rank: int
    world_size: int


_unsettled: dict[RankKey, list[AsyncSave]] = defaultdict(list)


def note(key: RankKey, save: AsyncSave) -> None:
    """Register a save that begins; it counts until it is over and its failure, if any, has been reported."""
    _unsettled[key] = [*_left(key), save]


def in_flight() -> list[AsyncSave]:
    """The saves of this process that are under way."""
    return [save for key in list(_unsettled) for save in _left(key) if not save.done()]


def wait_for_saves() -> None:
    """Returns when no save of this process is under way, whatever its group; does not say how they ended."""
    for save in in_flight():
        save.wait_until_done()


def failures(key: RankKey) -> dict[str, str]:
    """By save id, the errors of this rank's saves that have not been reported."""
    return {
        save.save_id: f"saving checkpoint {save.tag!r} in the background has failed: {save.failure}"
        for save in _left(key)
        if save.failure is not None and not save.told
    }


def settle(key: RankKey, save_ids: set[str]) -> None:
    """The errors of these saves have been raised, also of those that go on here and will only hear of it."""
    for save in _left(key):
        if save.save_id in save_ids:
            save.told = True


def report_at_exit() -> None:
    """The last chance to say that a save has failed."""
    for key in list(_unsettled):
        for text in failures(key).values():
            print(f"nxd_ckpt: {text}", file=sys.stderr)


def _left(key: RankKey) -> list[AsyncSave]:
    return [save for save in _unsettled.get(key, []) if not (save.done() and (save.told or save.committed))]


# A forked child has its parent's saves neither to wait for nor to report.
os.register_at_fork(after_in_child=_unsettled.clear)
