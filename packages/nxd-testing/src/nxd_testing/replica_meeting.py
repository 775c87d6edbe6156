"""Synchronization of the ranks that a graph's collectives connect, while other ranks do other work.

On devices, each rank runs its own graphs and synchronizes with others only in collectives. Here, a rank announces each
graph that it is about to run, in order, and waits for the announcements of its peers that include it. Everything goes
through the job's store, because the peers are not known in advance.
"""

import hashlib
import pickle
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from nxd_doctor.graphs import find_collectives, parse_hlo


def connected_ranks(text: str, rank: int, world_size: int) -> tuple[int, ...]:
    """Return `rank` and the ranks that a graph's collectives connect it to, directly or indirectly; ascending."""
    groups = [set(group) for it in find_collectives(parse_hlo(text), world_size=world_size) for group in it.groups]
    connected = {rank}
    while True:
        further = connected.union(*(group for group in groups if group & connected))
        if further == connected:
            return tuple(sorted(connected))
        connected = further


@dataclass(frozen=True)
class _Announcement:
    ranks: tuple[int, ...]  # empty: this rank has ended
    digest: str = ""


class Meetings:
    """The meetings of one rank in one job."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = dist.PrefixStore("meetings", store)
        self._rank = rank
        self._announced = 0
        self._read: dict[int, int] = {}  # number of announcements read, by peer

    def meet(self, ranks: tuple[int, ...], text: str) -> str:
        """Wait until all of `ranks` have announced this graph; returns a name of the meeting, the same on all ranks.

        Raises:
            RuntimeError: a rank announced a different graph, or has ended.
        """
        mine = _Announcement(ranks, hashlib.sha256(text.encode()).hexdigest())
        names = {self._rank: self._announce(mine)}
        for peer in ranks:
            if peer != self._rank:
                names[peer], theirs = self._next_of(peer, ranks)
                if theirs != mine:
                    self._store.set(f"{names[self._rank]}/text", text)
                    raise RuntimeError(self._describe(peer, mine, theirs, names, text))
        return names[ranks[0]]

    def gather(self, name: str, ranks: tuple[int, ...], value: Any) -> list[Any] | None:
        """Gather the values of all ranks on the first one."""
        if self._rank != ranks[0]:
            self._put(f"{name}/input/{self._rank}", value)
            return None
        return [value, *(self._take(f"{name}/input/{rank}") for rank in ranks[1:])]

    def scatter(self, name: str, ranks: tuple[int, ...], values: list[Any] | None) -> Any:
        """Send each rank its value from the first one."""
        if values is None:
            return self._take(f"{name}/result/{self._rank}")
        for rank, value in zip(ranks[1:], values[1:], strict=True):
            self._put(f"{name}/result/{rank}", value)
        return values[0]

    def end(self) -> None:
        """Announce that this rank has ended, for ranks that wait for it now or later."""
        self._announce(_Announcement(()))

    def _announce(self, announcement: _Announcement) -> str:
        name = f"{self._rank}/{self._announced}"
        self._announced += 1
        self._put(name, announcement)
        return name

    def _next_of(self, peer: int, ranks: tuple[int, ...]) -> tuple[str, _Announcement]:
        """The peer's next announcement that includes this rank."""
        while True:
            name = f"{peer}/{self._read.get(peer, 0)}"
            announcement: _Announcement = pickle.loads(self._store.get(name))
            if not announcement.ranks:
                raise RuntimeError(
                    f"rank {peer} has ended, and rank {self._rank} has recorded a graph with collectives between ranks "
                    f"{list(ranks)}: every rank of a group must take part in each of its collectives"
                )
            self._read[peer] = self._read.get(peer, 0) + 1
            if self._rank in announcement.ranks:
                return name, announcement

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes are accepted too

    def _take(self, key: str) -> Any:
        value = pickle.loads(self._store.get(key))
        self._store.delete_key(key)
        return value

    def _describe(self, peer: int, mine: _Announcement, theirs: _Announcement, names: dict[int, str], text: str) -> str:
        if theirs.ranks != mine.ranks:
            return (
                f"rank {peer} recorded another graph than rank {self._rank}: its collectives connect ranks "
                f"{list(theirs.ranks)}, instead of {list(mine.ranks)}"
            )
        return _first_difference(peer, self._store.get(f"{names[peer]}/text").decode(), self._rank, text)


def _first_difference(peer: int, their_text: str, rank: int, text: str) -> str:
    lines, others = text.splitlines()[1:], their_text.splitlines()[1:]  # without the list of all parameters
    pairs = zip([*lines, "(end)"], [*others, "(end)"], strict=False)
    line, other = next((pair for pair in pairs if pair[0] != pair[1]), ("(end)", "(end)"))
    return (
        f"rank {peer} recorded another graph than rank {rank}: {len(others)} lines instead of {len(lines)}, and first\n"
        f"  {other.strip()}\ninstead of\n  {line.strip()}\n"
        "A rank's index must come in as data: use Group.rank_tensor, not Group.rank"
    )
