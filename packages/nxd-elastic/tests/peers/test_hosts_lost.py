"""Checkpoints in the memory of hosts come back on any layout while no more hosts are lost than there are copies."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from nxd_ckpt import (
    CheckpointError,
    Shard,
    ShardedTensor,
    async_save,
    end_async_saves,
    gc,
    latest,
    load,
    open_checkpoint,
    retain,
    save,
)
from nxd_ckpt.testing import outcomes_on_threads, run_on_threads
from nxd_elastic.peers.client import MemoryServerClient
from nxd_elastic.peers.server import MemoryServer
from nxd_elastic.peers.starting import MemoryServerProcess
from nxd_elastic.peers.store import PeerStore, peers_url

pytestmark = pytest.mark.sample(8)  # each takes its time

HOSTS, RANKS, ROWS = 4, 8, 48


class Hosts:
    """Folders with memory servers, two ranks on each."""

    def __init__(self, folder, running):
        self.servers = []
        for number in range(HOSTS):
            server = running.enter_context(MemoryServerProcess(folder / f"host-{number}", "known to this test"))
            self.servers.append((server, folder / f"host-{number}"))

    def url(self, own, copies, among=range(HOSTS)):
        """For a rank of a host, over those that are left."""
        return peers_url([self.servers[it][0].address for it in among], self.servers[own][0].address, copies)

    def lose(self, number):
        """The host, with all in its memory."""
        server, folder = self.servers[number]
        server.close()
        shutil.rmtree(folder)

    def save(self, tag, value, copies, **options):
        """By eight ranks, each with its rows."""

        def save_rows(ranks):
            rows = whole(value).chunk(RANKS)[ranks.rank]
            state = {"w": ShardedTensor((ROWS, 6), [Shard(rows, (ranks.rank * ROWS // RANKS, 0))])}
            save(self.url(ranks.rank // 2, copies), tag, state, step=value, process_group=ranks, **options)

        run_on_threads(save_rows, RANKS)


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_PEERS_SECRET", "known to this test")
    with ExitStack() as running:
        yield Hosts(tmp_path, running)


def whole(value):
    return torch.arange(ROWS * 6.0).reshape(ROWS, 6) + 1000 * value


@pytest.mark.parametrize(("copies", "lost"), [(1, 1), (2, 2)])
def test_any_hosts_may_die_and_another_layout_loads(hosts, copies, lost):
    hosts.save("step-1", 1, copies)
    left = list(range(HOSTS))

    def load_columns(ranks):
        columns = torch.zeros(ROWS, 2)
        url = hosts.url(left[ranks.rank % len(left)], copies, among=left)
        load(url, into={"w": ShardedTensor((ROWS, 6), [Shard(columns, (0, 2 * ranks.rank))])}, process_group=ranks)
        return columns

    for number in (3, 0)[:lost]:  # neighbours, as copies go round
        hosts.lose(number)
        left.remove(number)
        assert torch.equal(torch.cat(run_on_threads(load_columns, 3), dim=1), whole(1))

    again = hosts.url(left[0], copies, among=left)
    save(again, "step-2", {"w": whole(2)}, step=2)
    assert latest(again).tag == "step-2"


def test_each_file_lies_on_as_many_hosts_as_asked_for_and_next_to_its_own(hosts):
    hosts.save("step-1", 1, copies=1)

    held = [
        {int(name.rsplit("-", 2)[1]) // 2 for name in files if "/data/" in name}
        for _, files in PeerStore(hosts.url(0, 1)).listings()
    ]

    assert held == [{number, (number - 1) % HOSTS} for number in range(HOSTS)]


def test_more_hosts_lost_than_copies_names_the_files_and_an_older_whole_checkpoint_is_taken(hosts):
    hosts.save("step-1", 1, copies=3)
    hosts.save("step-2", 2, copies=1)
    hosts.lose(1)
    hosts.lose(2)
    url = hosts.url(0, 1, among=(0, 3))
    into = torch.zeros(ROWS, 6)

    with pytest.raises(CheckpointError, match=r"step-2/data/.* is missing"):
        load(url, into={"w": into})
    loaded = load(url, into={"w": into}, fallback=True)

    assert loaded.tag == "step-1"
    assert torch.equal(into, whole(1))


@pytest.mark.parametrize("reached", range(HOSTS + 1))
def test_leader_that_dies_while_it_commits_leaves_the_old_or_the_new(hosts, reached, monkeypatch):
    hosts.save("t", 1, copies=1)
    put, manifests = MemoryServerClient.put, itertools.count()

    def dies(server, name, num_bytes):
        if name == "t/manifest.json" and next(manifests) == reached:
            raise KeyboardInterrupt
        return put(server, name, num_bytes)

    with monkeypatch.context() as dying:
        dying.setattr(MemoryServerClient, "put", dies)
        dying.setattr("nxd_elastic.peers.store.PeerSave.end", lambda self: None)  # nobody is left to tidy up
        with suppress(KeyboardInterrupt):
            save(hosts.url(0, 1), "t", {"w": whole(2)}, step=2, overwrite=True)

    expected = whole(2 if reached else 1)
    for own in range(HOSTS):
        assert torch.equal(open_checkpoint(hosts.url(own, 1)).read("w"), expected)


def test_saves_in_the_background_one_after_the_other_keep_the_newest(hosts):
    url = hosts.url(0, 2)
    value = torch.zeros(1000)
    for step in range(1, 6):
        value.fill_(step)
        async_save(url, f"step-{step}", {"w": value}, step=step).wait()
        retain(url, keep_last=2)
    end_async_saves()

    assert open_checkpoint(url).read("w").unique().item() == 5
    assert sorted(PeerStore(url).tags()) == ["step-4", "step-5"]
    assert gc(url, dead_after=0, dry_run=True) == []


@pytest.mark.usefixtures("fresh_interpreter")
def test_process_that_writes_in_the_background_has_no_torch(hosts):
    async_save(hosts.url(0, 1), "step-1", {"w": whole(1)}).wait(60)

    children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    [writer] = [it for it in children if b"nxd_ckpt.asynchronous.writer" in Path(f"/proc/{it}/cmdline").read_bytes()]
    assert "torch" not in Path(f"/proc/{writer}/maps").read_text()
    end_async_saves()


def test_files_that_may_be_those_of_a_save_at_work_are_no_garbage_yet(hosts):
    hosts.save("step-1", 1, copies=1)
    server = MemoryServerClient(hosts.servers[0][0].address)
    upload = server.put("step-2/data/x", 3)
    upload.send(b"123")
    upload.finish()

    assert gc(hosts.url(0, 1)) == []
    assert "step-2/data/x" in server.files()
    assert [it.num_bytes for it in gc(hosts.url(0, 1), dead_after=0)] == [3]
    assert "step-2/data/x" not in server.files()


def test_save_without_one_of_the_hosts_fails_on_every_rank_and_leaves_the_one_before(hosts):
    hosts.save("step-1", 1, copies=1)
    hosts.lose(2)

    def save_rows(ranks):
        rows = whole(2).chunk(RANKS)[ranks.rank]
        state = {"w": ShardedTensor((ROWS, 6), [Shard(rows, (ranks.rank * ROWS // RANKS, 0))])}
        save(hosts.url(ranks.rank // 2, 1), "step-2", state, process_group=ranks)

    outcomes = outcomes_on_threads(save_rows, RANKS)

    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    assert torch.equal(open_checkpoint(hosts.url(0, 1, among=(0, 1, 3))).read("w"), whole(1))


def test_memory_server_that_is_killed_is_followed_by_another_with_the_same_files(hosts, tmp_path):
    hosts.save("step-1", 1, copies=0)
    for server, _ in hosts.servers:
        os.kill(server.pid, signal.SIGKILL)
        server.close()

    with ExitStack() as running:
        anew = Hosts(tmp_path, running)

        assert torch.equal(open_checkpoint(anew.url(0, 0)).read("w"), whole(1))


def test_memory_server_ends_with_the_process_that_started_it(tmp_path):
    program = (
        "import os, sys; from nxd_elastic.peers.starting import MemoryServerProcess\n"
        "print(MemoryServerProcess(sys.argv[1], 's').address, flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)

    assert ended.returncode == -signal.SIGKILL
    server = MemoryServer(tmp_path, "127.0.0.1", "s")  # takes the folder's lock, waiting until the first has let go
    server.server_close()


@pytest.mark.parametrize(("servers", "own", "copies"), [([], "a:1", 1), (["a:1"], "b:1", 1), (["a:1"], "a:1", -1)])
def test_url_of_hosts_that_do_not_fit_is_refused(servers, own, copies):
    with pytest.raises(ValueError, match="do not match the memory servers"):
        peers_url(servers, own, copies)


@pytest.mark.parametrize("url", ["peers://", "peers://a:1/?copies=many", "peers://a:1/?own=b:1"])
def test_url_without_memory_servers_is_refused(url):
    with pytest.raises(ValueError, match="names no memory servers"):
        open_checkpoint(url)


def test_incremental_saves_are_refused(hosts):
    save(hosts.url(0, 1), "step-1", {"w": whole(1)}, incremental=True)

    with pytest.raises(CheckpointError, match="remove incremental=True"):
        save(hosts.url(0, 1), "step-2", {"w": whole(1)}, incremental=True)
