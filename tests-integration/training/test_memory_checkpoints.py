"""A run resumes from the memory of its hosts as from its checkpoints on disk, also when hosts are lost."""

import os
import shutil
from contextlib import ExitStack
from unittest.mock import patch

import nxd_ckpt
import pytest
import torch
from nxd_elastic.peers.starting import MemoryServerProcess
from nxd_elastic.peers.store import PeerStore, peers_url
from nxd_state import initialize_model_parallel
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training import StopRequest, prepare_run, run_training

pytestmark = pytest.mark.sample(2)  # each takes its time

SECRET = "known to this test"
IN_MEMORY = ["checkpoint.memory_every=1", "checkpoint.memory_copies=1"]
TP2 = "parallel.tensor_parallel_size=2"


def run(settings: list[str], servers: list[str]) -> tuple[str | None, float]:
    """Where this rank, on a host of its own as far as there are some, resumed from, and the last loss."""
    own = servers[int(os.environ["RANK"]) % len(servers)] if servers else ""
    variables = {"NXD_MEMORY_SERVERS": ",".join(servers), "NXD_MEMORY_SERVER": own, "NXD_PEERS_SECRET": SECRET}
    with patch.dict(os.environ, variables), StopRequest() as stop:
        recipe = load_recipe(None, settings)
        initialize_model_parallel(recipe.parallel.tensor_parallel_size)
        state, resumed = prepare_run(recipe)
        return resumed, run_training(state, resumed, stop).loss


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """Four memory servers, and their folders."""
    monkeypatch.setenv("NXD_PEERS_SECRET", SECRET)
    with ExitStack() as running:
        folders = [tmp_path / f"host-{number}" for number in range(4)]
        yield [(running.enter_context(MemoryServerProcess(folder, SECRET)), folder) for folder in folders]


def addresses(hosts) -> list[str]:
    return [server.address for server, _ in hosts]


def lose(host) -> None:
    server, folder = host
    server.close()
    shutil.rmtree(folder)


def tensors(folder) -> dict[str, torch.Tensor]:
    checkpoint = nxd_ckpt.open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors if not name.startswith("rng/")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world", "layout", "lost"),
    [
        pytest.param(4, [TP2], 0, id="same", marks=pytest.mark.slow),
        pytest.param(4, [TP2], 1, id="same-lost"),
        pytest.param(2, [TP2], 1, id="fewer-lost", marks=pytest.mark.slow),
        pytest.param(3, [], 0, id="other", marks=pytest.mark.slow),
        pytest.param(3, [], 1, id="other-lost"),
    ],
)
def test_run_resumes_from_memory_at_any_layout_with_a_host_lost(
    world, layout, lost, run_ranks, settings, hosts, tmp_path
):
    settings = [*settings, "train.global_batch_size=12", *IN_MEMORY]
    [(_, expected), *_] = run_ranks(run, 4, [*settings, TP2, f"output={tmp_path / 'whole'}"], addresses(hosts))
    for server, files in PeerStore(peers_url(addresses(hosts))).listings():
        server.remove(files)  # the second run is another job

    run_ranks(run, 4, [*settings, TP2, "train.stop_after=10"], addresses(hosts))
    shutil.rmtree(tmp_path / "run/checkpoints")
    if lost:
        lose(hosts[1])
        del hosts[1]
    resumed = run_ranks(run, world, [*settings, *layout], addresses(hosts))

    assert {where for where, _ in resumed} == {"step-00000010 in the memory of the hosts"}
    found, whole = tensors(tmp_path / "run/checkpoints"), tensors(tmp_path / "whole/checkpoints")
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        if world == 4:
            assert torch.equal(found[name], tensor), name
        else:
            torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-8 * tensor.abs().max().item())
    assert resumed[0][1] == (expected if world == 4 else pytest.approx(expected, rel=1e-9))


def test_newer_checkpoint_on_disk_is_preferred_and_lost_memory_is_passed_over(run_ranks, settings, hosts, tmp_path):
    settings = [*settings, "checkpoint.save_every=4"]
    often = [*settings, "checkpoint.memory_every=5", "checkpoint.memory_copies=0"]
    run_ranks(run, 4, [*often, "train.stop_after=6"], addresses(hosts))
    [(newer_on_disk, _), *_] = run_ranks(run, 4, [*often, "train.stop_after=11"], addresses(hosts))
    nxd_ckpt.delete(tmp_path / "run/checkpoints", "step-00000011")
    lose(hosts[0])  # whose rank has written what all replicas hold alike

    [(without_a_host, _), *_] = run_ranks(run, 3, [*often, "train.global_batch_size=9"], addresses(hosts[1:3]))

    assert newer_on_disk == "step-00000006"
    assert without_a_host == "step-00000008"


def test_memory_that_takes_nothing_ends_no_run(run_ranks, settings, hosts, capfd):
    gone = addresses(hosts)
    lose(hosts[1])

    resumed = run_ranks(run, 2, [*settings, *IN_MEMORY, "train.steps=2"], gone)

    assert [where for where, _ in resumed] == [None, None]
    assert "no checkpoint in the memory of hosts" in capfd.readouterr().out


def test_run_without_memory_servers_says_what_is_missing(run_ranks, settings):
    with pytest.raises(Exception, match="no host of this run keeps checkpoints in memory: add --elastic"):
        run_ranks(run, 1, [*settings, *IN_MEMORY], [])


def test_damaged_memory_begins_no_run_with_a_part_of_its_weights(run_ranks, settings, hosts, tmp_path):
    settings = [*settings, *IN_MEMORY, "train.steps=4"]
    run_ranks(run, 2, [*settings, "train.stop_after=2"], addresses(hosts)[:2])
    shutil.rmtree(tmp_path / "run/checkpoints")
    for _, folder in hosts[:2]:
        for file in folder.glob("step-00000002/data/*"):
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)

    with pytest.raises(Exception, match="the only checkpoint to resume from is damaged, in memory"):
        run_ranks(run, 2, settings, addresses(hosts)[:2])
