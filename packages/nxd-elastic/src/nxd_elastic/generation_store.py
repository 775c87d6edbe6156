"""The store through which the ranks of one generation find each other: waiting stops when the generation ends.

torch's own stores wait for a key until a timeout of many minutes, even if the rank that should set it has died.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from nxd_state import PeerError

_PAUSE = 0.002  # seconds
_PATIENCE = timedelta(minutes=30)


class GenerationStore(dist.Store):
    """A store that polls another one.

    Args:
        store: the store that holds the keys.
        reason_to_end: function that returns why waiting must stop, or None while it may continue.
    """

    def __init__(self, store: dist.Store, reason_to_end: Callable[[], str | None]) -> None:
        super().__init__()
        self._store, self._reason_to_end = store, reason_to_end
        self._clones: list[GenerationStore] = []

    def clone(self) -> "GenerationStore":
        """Return a store of the same keys with its own connection."""
        made = GenerationStore(self._store.clone(), self._reason_to_end)  # type: ignore[attr-defined]
        self._clones.append(made)  # torch keeps only its C++ half alive
        return made

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, once all are set."""
        self.wait(keys)
        return [self._store.get(key) for key in keys]

    def add(self, key: str, value: int) -> int:
        """Add to a number."""
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value."""
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set.

        Raises:
            PeerError: the generation has ended, so a caller that polls must stop.
        """
        found = self._store.check(list(keys))
        if not found and (reason := self._reason_to_end()) is not None:
            raise PeerError(f"stopped waiting for {', '.join(keys)}: {reason}")
        return found

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """The number of keys."""
        return self._store.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - as torch calls them from C++

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are set.

        Raises:
            PeerError: the generation has ended.
            torch.distributed.DistStoreError: the keys were not set in time.
        """
        give_up = time.monotonic() + (timeout or _PATIENCE).total_seconds()
        while not self._store.check(list(keys)):
            if (reason := self._reason_to_end()) is not None:
                raise PeerError(f"stopped waiting for {', '.join(keys)}: {reason}")
            if time.monotonic() > give_up:
                raise dist.DistStoreError(f"timed out waiting for {', '.join(keys)}")
            time.sleep(_PAUSE)
