"""The memory of hosts is a store as any other."""

from contextlib import ExitStack

import pytest
import torch
from nxd_ckpt import delete, gc, save
from nxd_ckpt.stores import open_store
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

    def test_delete_removes_a_checkpoint_with_a_damaged_manifest(self, root):
        """As in other stores."""
        save(root, "a", {"w": torch.ones(4)})
        store = open_store(root)
        for server in store.servers:
            upload = server.put("a/manifest.json", 7)
            upload.send(b"damaged")
            upload.finish()

        delete(root, "a")

        assert store.tags() == []
        assert gc(root, dead_after=0) == []
