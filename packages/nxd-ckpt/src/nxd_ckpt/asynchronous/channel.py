"""Communication between the ranks of one background save, separate from the communication of training.

Each save has its own channel, so that messages of an earlier save cannot be mistaken for its own. The channel outlives
the process group: training may destroy that while a save is still under way.
"""

import contextlib
import os
import socket
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nxd_ckpt.coordinator import Coordinator
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.messages import expect, parsed
from nxd_ckpt.store_coordinator import StoreCoordinator, own_identity

_LEAVE_SECONDS = 10.0


class Channel:
    """A `Coordinator` for the thread of a background save. Make it on all ranks, in the caller's thread.

    Raises:
        CheckpointError: the process that hosts the store cannot be reached.
    """

    def __init__(self, coordinator: Coordinator, save_id: str, timeout: float) -> None:
        self.rank, self.world_size = coordinator.rank, coordinator.world_size
        try:
            self._source = _store_of(coordinator, timeout, self)
            # A store handles one call at a time, and training's calls may take long; so this connection is separate.
            own: dist.Store = self._source.clone()
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} of {self.world_size} cannot reach the store through which the ranks talk to one "
                f"another: {error}"
            ) from error
        self._store = dist.PrefixStore(f"nxd_ckpt/{save_id}", own)
        processes = coordinator.processes if isinstance(coordinator, StoreCoordinator) else None
        self._coordinator = StoreCoordinator(
            self._store, self.rank, self.world_size, prefix="gather", timeout=timeout, processes=processes
        )

    def all_gather_object(self, value: object) -> list[object]:
        """See `Coordinator`."""
        return self._coordinator.all_gather_object(value)

    def leave(self) -> None:
        """End the communication. Rank 0 may host the store, so it waits until the others know how the save ended."""
        with contextlib.suppress(RuntimeError):
            if self.rank > 0:
                self._store.set(f"left/{self.rank}", "")
            else:
                self._wait_for_the_others()
        del self._coordinator, self._store, self._source  # closes the connections now, not when garbage is collected

    def _wait_for_the_others(self) -> None:
        others = {rank: f"left/{rank}" for rank in range(1, self.world_size)}
        deadline = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < deadline:
            awaited = [key for rank, key in others.items() if not self._coordinator.has_ended(rank)]
            if not awaited or self._store.check(awaited):
                break
            time.sleep(0.01)
        for key in others.values():
            self._store.delete_key(key)


def _address_from(message: Any) -> tuple[str, int]:
    host, number = message
    expect(isinstance(host, str) and type(number) is int, f"the address {message!r:.200}")
    return host, number


def _store_of(coordinator: Coordinator, timeout: float, channel: Channel) -> dist.Store:
    """Return the store of a process group, or a new one that rank 0 hosts as long as the channel exists.

    On one machine, ranks use memory of rank 0 that other users cannot open. Otherwise they connect to a port of rank 0,
    which anyone who reaches it can use.
    """
    if isinstance(coordinator, StoreCoordinator):
        return coordinator.store
    if coordinator.world_size == 1:
        return dist.HashStore()

    def gather(own: tuple[str, int]) -> list[tuple[str, int]]:
        sent = coordinator.all_gather_object(own)
        return parsed(sent, _address_from, "connecting the ranks of a background save")

    process = own_identity()
    sent = gather(("", 0) if process is None else (process.place, process.pid))
    if "" not in (places := {place for place, _ in sent}) and len(places) == 1:
        memory = 0
        if coordinator.rank == 0:
            memory = os.memfd_create("nxd_ckpt channel")
            weakref.finalize(channel, os.close, memory)
        (_, memory), *_ = gather(("", memory))
        return dist.FileStore(f"/proc/{sent[0][1]}/fd/{memory}", -1)
    server: dist.TCPStore | None = None
    if coordinator.rank == 0:
        server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (host, port), *_ = gather((socket.gethostname(), server.port if server else 0))
    if server is not None:
        return server
    here = host == socket.gethostname()
    return dist.TCPStore("localhost" if here else host, port, timeout=timedelta(seconds=timeout))
