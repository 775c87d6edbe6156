"""Agreement before each collective, over a side channel, so that a mismatch raises instead of hanging.

Enabled if `NXD_DEBUG_COLLECTIVES=1` is set when model parallelism is initialized. Every rank posts its next operation
in the job's key-value store and reads what its peers posted. Three things raise, with the call sites of all ranks
concerned: a peer that posted something else for the same turn of the same group; ranks that wait for each other in
different groups; and a peer that raised one of these errors instead of arriving, so that the error reaches every rank
that depends on it. The job cannot continue afterwards: the ranks no longer agree on each other's turns.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from nxd_state.group import Group
from nxd_state.script_world import store_of_job
from nxd_state.store_messages import printable, read_message

_NOT_CALL_SITES = (str(Path(__file__).parents[1]), str(Path(dist.__file__).parents[1]), "<frozen")
_FRAMES_SHOWN = 3
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.05


class CollectiveMismatch(RuntimeError):
    """Ranks of a group were about to run different collectives."""


@dataclass(frozen=True)
class Announcement:
    """What a rank last announced: which collective it reached, and whether it waits there, continued, or raised."""

    rank: int
    does: str
    at: str
    axis: str
    ranks: tuple[int, ...]
    group_name: str
    turn: int
    state: Literal["waited", "went on", "raised"] = "waited"
    error: str = ""

    @property
    def key(self) -> str:
        """The store key under which the peers of this turn find it."""
        return self.key_of(self.rank)

    def key_of(self, rank: int) -> str:
        """The store key of the announcement of `rank` in this turn of this group."""
        return f"nxd_debug/{self.group_name}/{self.turn}/{rank}"

    def __str__(self) -> str:
        return f"  rank {self.rank}: {self.does} in group {self.axis} {list(self.ranks)}\n    at {self.at}"


class _Turns:
    """How many collectives each group has announced, counted afresh for each torch.distributed job."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._counts: Counter[str] = Counter()

    def next(self, store: dist.Store, group_name: str) -> int:
        if store is not self._store:
            self._store, self._counts = store, Counter()
        self._counts[group_name] += 1
        return self._counts[group_name]


_turns = _Turns()
_is_on = False


def read_environment() -> None:
    """Turn debug mode on or off; not at each collective, since that takes a tenth of a small one's time."""
    global _is_on  # noqa: PLW0603  (as the environment, one for the process)
    _is_on = os.environ.get("NXD_DEBUG_COLLECTIVES") == "1"


def enabled() -> bool:
    """Whether `NXD_DEBUG_COLLECTIVES=1` was set when the environment was last read."""
    return _is_on


read_environment()


def pair(group: Group, source: int, destination: int) -> Group:
    """The two members of `group` that exchange a message, as a group with its own turns."""
    ranks = (group.ranks[source], group.ranks[destination])
    index = ranks.index(group.ranks[group.rank])
    name = f"{group.name}/{source}>{destination}"
    return replace(group, ranks=ranks, rank=index, replica_groups=(ranks,), name=name)


def wait_for_agreement(name: str, group: Group, tensor: Tensor | None, details: dict[str, Any]) -> None:
    """Wait until every rank of `group` has announced this same collective.

    Raises:
        CollectiveMismatch: see the module; or a peer announced nothing within the process group's timeout.
    """
    mine = announce(name, group, tensor, details)
    store = store_of_job()
    _confirm(store, mine)
    # All have come to this turn, so all have read what was posted for the one before.
    store.delete_key(replace(mine, turn=mine.turn - 1).key)


def announce(name: str, group: Group, tensor: Tensor | None, details: dict[str, Any]) -> Announcement:
    """Announce this rank's next operation in `group` without waiting for the others."""
    store = store_of_job()
    mine = Announcement(
        rank=group.ranks[group.rank],
        does=_describe(name, tensor, details),
        at=_call_site(),
        axis=group.axis,
        ranks=group.ranks,
        group_name=group.name,
        turn=_turns.next(store, group.name),
    )
    _write(store, mine.key, mine)
    return mine


def confirm_message(mine: Announcement) -> None:
    """Wait until the other end of a message (see `pair`) has announced the same."""
    store = store_of_job()
    _confirm(store, mine)
    # Its one reader has read it. Turns need not be confirmed in their order, so none tells of those before it.
    (peer,) = set(mine.ranks) - {mine.rank}
    store.delete_key(mine.key_of(peer))


def _confirm(store: dist.Store, mine: Announcement) -> None:
    _set_last(store, mine)
    try:
        _await_peers(store, mine)
    except CollectiveMismatch as mismatch:
        _set_last(store, replace(mine, state="raised", error=str(mismatch)))
        raise
    _set_last(store, replace(mine, state="went on"))


def _await_peers(store: dist.Store, mine: Announcement) -> None:
    patience: float = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
    deadline = time.monotonic() + patience
    pause = _FIRST_POLL_SECONDS
    awaited = set(mine.ranks) - {mine.rank}
    while True:
        awaited -= {rank for rank in awaited if _has_come(store, mine, rank)}
        if not awaited:
            return
        cycle = _find_cycle(store, mine)
        if cycle:
            raise CollectiveMismatch(f"ranks wait for each other in different groups:\n{_listed(cycle)}")
        if time.monotonic() > deadline:
            rank = min(awaited)
            last = _last(store, rank)
            whereabouts = f"it last {last.state}:\n{last}" if last else "it has announced none so far"
            raise CollectiveMismatch(
                f"rank {rank} did not reach this collective in {patience:.0f} s:\n{mine}\n{whereabouts}"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)


def _has_come(store: dist.Store, mine: Announcement, rank: int) -> bool:
    """Whether `rank` announced this same collective; raises if it announced another one, or never will."""
    last = _last(store, rank)  # before its post, so that what it raises after posting is not taken for a reason
    peer = _read(store, mine.key_of(rank))
    if peer is None:
        if last is not None and last.state == "raised":
            raise CollectiveMismatch(f"rank {rank} will not reach this collective:\n{mine}\n{last.error}")
        return False
    if peer.does != mine.does:
        raise CollectiveMismatch(f"ranks reached different collectives:\n{_listed([mine, peer])}")
    return True


def _find_cycle(store: dist.Store, mine: Announcement) -> list[Announcement]:
    """The ranks of a cycle of waits that includes this rank; empty if there is no cycle."""
    paths = [[mine]]
    visited = {mine.rank}
    while paths:
        path = paths.pop()
        for rank in _missing(store, path[-1]):
            if rank == mine.rank:
                return path if _all_still_wait(store, path) else []
            last = _last(store, rank)
            if rank not in visited and last is not None and last.state == "waited":
                visited.add(rank)
                paths.append([*path, last])
    return []


def _all_still_wait(store: dist.Store, cycle: list[Announcement]) -> bool:
    """Read the announcements again: those that are unchanged all held at the same time."""
    followers = [*cycle[1:], cycle[0]]
    return all(
        _last(store, waiting.rank) == waiting and follower.rank in _missing(store, waiting)
        for waiting, follower in zip(cycle, followers, strict=True)
    )


def _missing(store: dist.Store, waiting: Announcement) -> Iterator[int]:
    """The ranks that have not reached the turn at which `waiting` waits."""
    return (rank for rank in set(waiting.ranks) - {waiting.rank} if not store.check([waiting.key_of(rank)]))


def _set_last(store: dist.Store, announcement: Announcement) -> None:
    _write(store, f"nxd_debug/last/{announcement.rank}", announcement)


def _last(store: dist.Store, rank: int) -> Announcement | None:
    return _read(store, f"nxd_debug/last/{rank}")


def _write(store: dist.Store, key: str, announcement: Announcement) -> None:
    store.set(key, json.dumps(asdict(announcement)))


def _read(store: dist.Store, key: str) -> Announcement | None:
    if not store.check([key]):
        return None
    return read_message(key, store.get(key), _announcement_from)


def _announcement_from(fields: dict[str, Any]) -> Announcement:
    texts = {name: printable(text) for name, text in fields.items() if isinstance(text, str)}
    return Announcement(**fields | texts | {"ranks": tuple(fields["ranks"])})


def _listed(announcements: list[Announcement]) -> str:
    return "\n".join(map(str, sorted(announcements, key=lambda announced: announced.rank)))


def _describe(name: str, tensor: Tensor | None, details: dict[str, Any]) -> str:
    shown = [f"{key}={value}" for key, value in details.items()]
    if tensor is not None:
        shown = [f"{tuple(tensor.shape)}", str(tensor.dtype), *shown]
    return f"{name}({', '.join(shown)})"


def _call_site() -> str:
    """The innermost frames outside this package and torch, innermost first."""
    frames: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(frames) < _FRAMES_SHOWN:
        if not frame.f_code.co_filename.startswith(_NOT_CALL_SITES):
            frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " <- ".join(frames)
