"""The memory of hosts is a store as any other."""

from contextlib import ExitStack

import pytest
from nxd_ckpt.testing import StoreTests
from nxd_elastic.peers.starting import MemoryServerProcess
from nxd_elastic.peers.store import peers_url


@pytest.fixture
def root(tmp_path, monkeypatch):
    """In the memory of three hosts, of which two have each file."""
    monkeypatch.setenv("NXD_PEERS_SECRET", "known to this test")
    with ExitStack() as running:
        hosts = [
            running.enter_context(MemoryServerProcess(tmp_path / f"host-{i}", "known to this test")) for i in range(3)
        ]
        addresses = [host.address for host in hosts]
        yield peers_url(addresses, addresses[0])


class TestPeerStore(StoreTests):
    """By memory servers on this machine."""
